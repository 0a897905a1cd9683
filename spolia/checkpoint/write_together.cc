#include "spolia/checkpoint/write_together.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <string>
#include <utility>

#include "spolia/base/error.h"
#include "spolia/checkpoint/rank_loads.h"
#include "spolia/comm/agree.h"
#include "spolia/comm/exchange.h"
#include "spolia/engine/file_sink.h"

namespace spolia {
namespace {

/// What finish_file() says of several files is sent as one text; it has no NUL.
constexpr char kBetweenFiles = '\0';

std::vector<std::string> split_texts(const std::vector<std::string>& of_ranks) {
  std::vector<std::string> all;
  for (const std::string& texts : of_ranks) {
    for (size_t begin = 0; begin < texts.size();) {
      const size_t end = texts.find(kBetweenFiles, begin);
      all.push_back(texts.substr(begin, end - begin));
      begin = end + 1;
    }
  }
  return all;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

std::vector<uint32_t> files_of(const PieceTarget& pieces) {
  std::set<uint32_t> files;
  for (const TensorEntry& piece : pieces.catalog().tensors) files.insert(piece.extents[0].file);
  return {files.begin(), files.end()};
}

std::string write_share(const RankShare& share, OutputFolder& folder, std::vector<OutputFile*>& files,
                        const WriteOptions& options, Report& report) {
  files.assign(share.target.catalog().files.size(), nullptr);
  for (uint32_t file : share.files) files[file] = &folder.create(share.target.catalog().files[file]);
  BlockChecksums of_pieces(share.pieces.catalog(), share.pieces.checksum_block());
  FileSink sink(share.pieces, files, of_pieces, share.plan.threads);
  report = execute(share.plan, share.source, share.pieces.catalog(), sink, options.execute);
  sink.finish();

  BlockChecksums checksums(share.target.catalog(), share.target.checksum_block());
  share.pieces.put_checksums(of_pieces, checksums);
  std::string finished;
  for (uint32_t file : share.files) {
    finished += share.target.finish_file(file, checksums, *files[file], folder);
    finished += kBetweenFiles;
  }
  return finished;
}

Report write_together(Group& group, const RankShare& share, Store& store,
                      const std::filesystem::path& destination, const WriteOptions& options) {
  const bool is_first = group.place() == 0;
  std::optional<StagedFolder> staged;
  agree(group, "making the folder", [&] {
    if (is_first) staged.emplace(store, destination, options.existing);
  });
  const std::vector<std::string> paths = all_gather_texts(group, is_first ? staged->path().string() : "");

  Report report;
  std::vector<OutputFile*> files;
  std::optional<OutputFolder> own;
  if (!is_first) own.emplace(store, paths[0]);
  OutputFolder& folder = is_first ? staged->files() : *own;
  std::string finished;
  auto sync = [&] {
    const auto start = std::chrono::steady_clock::now();
    options.durable ? folder.sync(share.plan.threads, options.execute.cancel) : folder.close();
    report.seconds["sync"] += seconds_since(start);
  };
  agree(group, "writing", [&] {
    try {
      finished = write_share(share, folder, files, options, report);
      if (!is_first) sync();  // place 0 has more to write
    } catch (const NotFoundError& error) {
      // Where a rank is lost, place 0 takes the folder away while others still write: that is not their
      // failure.
      const std::string broken = group.backend().broken();
      if (broken.empty()) throw;
      throw PeerFailedError("{} ({})", broken, error.what());
    }
  });
  const std::vector<std::string> all_finished = split_texts(all_gather_texts(group, finished));

  agree(group, "publishing", [&] {
    if (!is_first) return;
    OutputFile* const first = files.empty() ? nullptr : files.front();
    report.left_out = share.target.finish(share.values, all_finished, first, folder);
    sync();
    if (options.check) options.check(staged->path());
    if (options.execute.cancel != nullptr) options.execute.cancel->check();
    staged->publish(options.durable);
    report.notes.insert(report.notes.end(), staged->notes().begin(), staged->notes().end());
  });
  note_loads(group, report.bytes_written, report);
  return report;
}

}  // namespace spolia
