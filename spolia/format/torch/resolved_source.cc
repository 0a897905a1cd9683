#include "spolia/format/torch/resolved_source.h"

#include <algorithm>

#include "spolia/format/torch/payload_table.h"

namespace spolia {
namespace {

class ResolvedSource final : public Source {
 public:
  ResolvedSource(Catalog catalog, std::vector<ResolvedTensor> tensors, std::unique_ptr<OpenFiles> files)
      : files_(std::move(files)) {
    std::ranges::stable_sort(tensors, {}, [](const ResolvedTensor& t) -> auto& { return t.entry.name; });
    catalog_ = std::move(catalog);
    for (ResolvedTensor& tensor : tensors) {
      for (const Payload& payload : tensor.payloads) tensor.entry.extents.push_back(payload.stored);
      catalog_.tensors.push_back(std::move(tensor.entry));
    }
    sort_entries(catalog_);  // checks names; the order of the tensors is the same
    payloads_ = std::make_unique<PayloadTable>(catalog_);
    for (size_t t = 0; t < tensors.size(); ++t) {
      for (size_t c = 0; c < tensors[t].payloads.size(); ++c) payloads_->set(t, c, tensors[t].payloads[c]);
    }
  }

  Payload payload(size_t tensor, size_t chunk) const override {
    return payloads_->find(tensor, chunk).value();
  }
  Value value(size_t index) const override { return catalog_.values[index].value; }
  const InputFile& file(uint32_t index) const override { return files_->get(catalog_, index); }

 private:
  std::unique_ptr<OpenFiles> files_;
  std::unique_ptr<PayloadTable> payloads_;
};

}  // namespace

std::unique_ptr<Source> make_resolved_source(Catalog catalog, std::vector<ResolvedTensor> tensors,
                                             std::unique_ptr<OpenFiles> files) {
  return std::make_unique<ResolvedSource>(std::move(catalog), std::move(tensors), std::move(files));
}

}  // namespace spolia
