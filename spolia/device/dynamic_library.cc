#include "spolia/device/dynamic_library.h"

#include <dlfcn.h>

#include "spolia/base/error.h"

namespace spolia {

DynamicLibrary::DynamicLibrary(std::string_view what, std::initializer_list<const char*> files) {
  std::string errors;
  for (const char* file : files) {
    handle_ = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (handle_ != nullptr) {
      file_ = file;
      return;
    }
    const char* error = dlerror();
    if (!errors.empty()) errors += "; ";
    errors += error == nullptr ? file : error;
  }
  throw UnsupportedError("{} is not there: {}", what, errors);
}

void* DynamicLibrary::address_of(const char* name) const {
  void* address = dlsym(handle_, name);
  if (address == nullptr) throw UnsupportedError("{} has no function {}: it is too old", file_, name);
  return address;
}

}  // namespace spolia
