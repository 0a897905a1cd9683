// Plugins: shared libraries that bring what not every machine has. They are loaded when they are asked for.
#pragma once

#include <string>
#include <string_view>

namespace spolia {

/// A function that the plugin `name` ("spolia_mpi") exports. The plugin is looked for as lib<name>.so in the
/// folders of $SPOLIA_PLUGIN_PATH (between colons), beside the program or library that this code is in and in
/// the `lib` folders next to it, then wherever the loader looks. It stays loaded until the process ends.
/// UnsupportedError that names the plugin, where it was looked for, and what `remedy` says, where it is not
/// there or cannot be loaded.
void* load_plugin(std::string_view name, const char* function, std::string_view remedy);

}  // namespace spolia
