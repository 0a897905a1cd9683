// Shared libraries that not every machine has, opened when they are needed.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

namespace spolia {

/// An open shared library; it stays open until the process ends. A plain handle.
class DynamicLibrary {
 public:
  /// Opens the first of `files` that the loader finds; one that the process has loaded already is found by
  /// its name. UnsupportedError "WHAT is not there: ...", with the loader's words, where there is none.
  DynamicLibrary(std::string_view what, std::initializer_list<const char*> files);

  /// Sets `function` to what the library calls `name`; UnsupportedError where it has none.
  template <class Function>
  void find(const char* name, Function*& function) const {
    function = reinterpret_cast<Function*>(address_of(name));
  }

 private:
  void* address_of(const char* name) const;

  std::string file_;
  void* handle_ = nullptr;
};

}  // namespace spolia
