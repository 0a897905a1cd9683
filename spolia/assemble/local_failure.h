// What goes wrong on one rank while it goes on taking part in what others wait for.
#pragma once

#include <exception>

namespace spolia {

/// Keeps the first failure of steps that concern this rank alone, until all can be told.
class LocalFailure {
 public:
  template <class Step>
  void guard(const Step& step) noexcept {
    try {
      step();
    } catch (...) {
      if (!first_) first_ = std::current_exception();
    }
  }
  /// nullptr: there is none.
  const std::exception_ptr& first() const { return first_; }

 private:
  std::exception_ptr first_;
};

}  // namespace spolia
