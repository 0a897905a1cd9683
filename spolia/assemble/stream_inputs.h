// What a stream is planned from: what the ranks hold, what is to be made of it, and who wants what.
#pragma once

#include <array>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/assemble/assembler.h"
#include "spolia/assemble/stream_groups.h"
#include "spolia/assemble/stream_plan.h"
#include "spolia/checkpoint/description.h"

namespace spolia {

/// The descriptions of the ranks in the grid; others of the world have none. Collective: travels through the
/// stream's groups alone, each distinct description once.
Descriptions exchange_descriptions(const StreamGroups& groups, const Description& own);

/// The tensors of the job, in boxes. Pure. UnsupportedError for one of elements finer than a byte that is
/// cut.
std::vector<StreamSource> stream_sources(const JobState& job);

/// What is made of them, in order of the names, wanted by all. Pure; throws what compile_mapping() and
/// fill_element() do.
std::vector<StreamOutput> stream_outputs(const JobState& job, const Mapping* mapping,
                                         const MappingOptions& options);

/// What one rank asks for, as it travels.
std::string encode_wish(const AssemblerOptions& options);
/// Notes in the outputs who wants them. `wishes`: of each seat. Pure. NotFoundError and InvalidArgumentError
/// name the rank.
void note_wishes(const StreamGrid& grid, std::span<const std::string> wishes,
                 std::vector<StreamOutput>& outputs);

/// An element of this value; of elements finer than a byte, whole bytes of it. UnsupportedError where the
/// dtype has no such value.
std::array<std::byte, 16> fill_element(DType dtype, double value);

}  // namespace spolia
