#include "spolia/format/torch/flatten.h"

#include <algorithm>

#include "spolia/base/error.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

using pickle::Kind;
using pickle::Ref;

constexpr size_t kMostDepth = 200;
constexpr size_t kNodeCost = 24;  // of a value in the state's memory; a text's byte costs 1

class Flattener {
 public:
  explicit Flattener(const TensorPickle& pickle)
      : pickle_(pickle), allowance_((size_t{1} << 16) + 64 * pickle.pickle_bytes()) {}

  FlatState run() {
    const Ref& root = pickle_.root();
    if (!descends(root)) path_.emplace_back(pickle_.tensor(root) != nullptr ? "tensor" : "value");
    visit(root);
    return std::move(state_);
  }

 private:
  /// Parts that are shared appear once for each reference, so a small pickle could ask for a huge state.
  void spend(size_t amount) {
    if (amount > allowance_) {
      throw CorruptError("{}: shared parts would make the state far larger than the pickle, at {}",
                         pickle_.where(), quote(joined(path_)));
    }
    allowance_ -= amount;
  }

  void check_depth(size_t depth) const {
    if (depth > kMostDepth) {
      throw CorruptError("{}: more than {} levels are nested (or a cycle), at {}", pickle_.where(),
                         kMostDepth, quote(joined(path_)));
    }
  }

  bool descends(const Ref& ref, size_t depth = 0) {
    if (ref.is(Kind::kDict)) return true;
    if (!ref.is(Kind::kList)) return false;
    check_depth(path_.size() + depth);
    spend(ref.items().size());
    return std::ranges::any_of(ref.items(), [&](const Ref& item) {
      return pickle_.tensor(item) != nullptr || descends(item, depth + 1);
    });
  }

  void visit(const Ref& ref) {
    check_depth(path_.size());
    spend(1);
    if (ref.is(Kind::kDict)) {
      auto items = ref.items();
      for (size_t i = 0; i < items.size(); i += 2) visit_at(key_text(items[i]), items[i + 1]);
    } else if (descends(ref)) {
      auto items = ref.items();
      for (size_t i = 0; i < items.size(); ++i) visit_at(static_cast<int64_t>(i), items[i]);
    } else {
      leaf(ref);
    }
  }

  /// `key`: text, or a list's index.
  template <class Key>
  void visit_at(Key key, const Ref& ref) {
    path_.emplace_back(std::move(key));
    visit(ref);
    path_.pop_back();
  }

  void leaf(const Ref& ref) {
    for (const PathKey& key : path_) {
      const std::string* text = std::get_if<std::string>(&key);
      spend(1 + (text == nullptr ? 0 : text->size()));
    }
    if (const PickledTensor* tensor = pickle_.tensor(ref)) {
      state_.tensors.push_back({path_, tensor});
      return;
    }
    if (std::string name = TensorPickle::unknown_tensor(ref); !name.empty()) {
      throw UnsupportedError("{}: {} is a tensor made by {}, a form that Spolia does not read",
                             pickle_.where(), quote(joined(path_)), name);
    }
    spend_tree(ref, 0);
    state_.values.push_back({path_, pickle_.value(ref)});
  }

  /// Spends what `ref` takes as a tree.
  void spend_tree(const Ref& ref, size_t depth) {
    check_depth(depth);
    switch (ref.kind()) {
      case Kind::kString:
      case Kind::kBytes:
      case Kind::kBigInt:
        return spend(kNodeCost + ref.text().size());
      case Kind::kTuple:
      case Kind::kList:
      case Kind::kDict:
      case Kind::kSet:
        spend(kNodeCost);
        for (const Ref& item : ref.items()) spend_tree(item, depth + 1);
        return;
      case Kind::kObject:
        spend(kNodeCost);
        for (const Ref* part :
             {&ref.callable(), &ref.args(), &ref.kwargs(), &ref.state(), &ref.appended(), &ref.entries()}) {
          if (!part->is_none()) spend_tree(*part, depth + 1);
        }
        return;
      case Kind::kGlobal:
        return spend(kNodeCost + ref.global().module.size() + ref.global().name.size());
      default:
        spend(kNodeCost);
        if (const PickledTensor* tensor = pickle_.tensor(ref)) {
          spend(kNodeCost * tensor->global_shape().size());
          ++state_.tensors_in_values;
        }
        return;
    }
  }

  /// Python's str(key).
  std::string key_text(const Ref& key) {
    if (key.is(Kind::kString)) return std::string(key.text());
    if (key.is(Kind::kInt)) return std::to_string(key.as_int());
    spend_tree(key, 0);
    return pickle_.value(key).text();
  }

  const TensorPickle& pickle_;
  size_t allowance_;
  KeyPath path_;
  FlatState state_;
};

}  // namespace

FlatState flatten(const TensorPickle& pickle) { return Flattener(pickle).run(); }

}  // namespace spolia
