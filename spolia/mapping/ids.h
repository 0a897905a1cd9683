// The macros that make several names, or several statements, out of patterns.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "spolia/mapping/macros.h"

namespace spolia {

/// The names that the statements so far write. What matches no tensor may match one of them.
using WrittenNames = std::set<std::string, std::less<>>;

/// The statement once for every combination of its ids. Where nothing matches there is none, and a note.
std::vector<Statement> expand_ids(const Statement& statement, const MacroContext& context,
                                  const WrittenNames& written, std::vector<std::string>& notes);

/// Ranges and stars of both sides become several operands.
void expand_names(Statement& statement, const MacroContext& context, const WrittenNames& written);

}  // namespace spolia
