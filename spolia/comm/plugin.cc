#include "spolia/comm/plugin.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <vector>

#include <fmt/ranges.h>

#include "spolia/base/error.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

namespace fs = std::filesystem;

/// The folder of the program or shared library that holds this function; empty where nobody knows.
fs::path own_folder() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&load_plugin), &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code ignored;
  // A program is known by the name it was called with, which need not be a path.
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored);
  fs::path own = fs::canonical(info.dli_fname, ignored);
  if (own.empty() || own.filename() == program.filename()) own = program;
  return own.parent_path();
}

std::vector<fs::path> folders() {
  std::vector<fs::path> found;
  if (const char* path = std::getenv("SPOLIA_PLUGIN_PATH")) {
    std::string_view rest = path;
    while (!rest.empty()) {
      const size_t end = std::min(rest.find(':'), rest.size());
      if (end > 0) found.emplace_back(rest.substr(0, end));
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
  }
  if (const fs::path own = own_folder(); !own.empty()) {
    found.push_back(own);
    for (const char* beside : {"../lib", "../" SPOLIA_LIBRARY_FOLDER}) {
      const fs::path folder = (own / beside).lexically_normal();
      if (folder != found.back()) found.push_back(folder);
    }
  }
  return found;
}

std::string loader_error() {
  const char* text = dlerror();
  return text == nullptr ? "unknown error" : text;
}

}  // namespace

void* load_plugin(std::string_view name, const char* function, std::string_view remedy) {
  const std::string file = fmt::format("lib{}.so", name);
  std::vector<std::string> tried;
  void* library = nullptr;
  for (const fs::path& folder : folders()) {
    const std::string path = (folder / file).string();
    std::error_code ignored;
    tried.push_back(quote(path));
    if (!fs::exists(path, ignored)) continue;
    library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) {
      throw UnsupportedError("the plugin {} cannot be loaded: {}; {}", quote(path), loader_error(), remedy);
    }
    break;
  }
  if (library == nullptr) library = dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    throw UnsupportedError("the plugin {} is not there: looked for as {}, and by the loader ({}); {}", name,
                           fmt::join(tried, ", "), loader_error(), remedy);
  }
  void* found = dlsym(library, function);
  if (found == nullptr) {
    throw UnsupportedError("the plugin {} has no function {}: it belongs to another version of Spolia", name,
                           function);
  }
  return found;
}

}  // namespace spolia
