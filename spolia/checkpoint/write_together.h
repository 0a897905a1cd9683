// Writing a checkpoint from all ranks of a group: each writes its files, and one result appears, or nothing.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "spolia/base/cancel.h"
#include "spolia/base/report.h"
#include "spolia/checkpoint/pieces.h"
#include "spolia/checkpoint/staged_folder.h"
#include "spolia/comm/group.h"
#include "spolia/engine/executor.h"
#include "spolia/plan/transfer_plan.h"

namespace spolia {

/// What one rank writes.
struct RankShare {
  const Target& target;       // as far as the rank's files go; on place 0 as far as finish() has to know
  const PieceTarget& pieces;  // its chunks
  const TransferPlan& plan;   // from `source` into the pieces
  const Source& source;
  const Source& values;         // of the target's values; on place 0
  std::vector<uint32_t> files;  // which of the target's files the rank writes, rising
};

struct WriteOptions {
  Existing existing = Existing::kRefuse;
  bool durable = true;  // wait until everything is on the disk
  ExecuteOptions execute;
  /// Called on place 0 with the partial folder, when all is written and before it is published; what it
  /// throws stops that.
  std::function<void(const std::filesystem::path& folder)> check;
};

/// Collective over the group. Place 0 makes the partial folder, all write into it and make durable what they
/// wrote, place 0 writes the rest and publishes. Every rank sees one file system. What fails on one rank is
/// thrown on all, and the partial folder removed; where this throws after the folder has its name, it is
/// whole.
Report write_together(Group& group, const RankShare& share, Store& store,
                      const std::filesystem::path& destination, const WriteOptions& options);

/// What one rank writes of it, into a folder that is there, and what finish() has to know of that. `files`
/// gets the target's files, those of others null.
std::string write_share(const RankShare& share, OutputFolder& folder, std::vector<OutputFile*>& files,
                        const WriteOptions& options, Report& report);

/// The files in which the pieces lie, rising.
std::vector<uint32_t> files_of(const PieceTarget& pieces);

}  // namespace spolia
