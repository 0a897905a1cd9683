// A vector of plain values that keeps the first N in place: what dims, offsets and strides are made of.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <span>
#include <stdexcept>
#include <type_traits>

namespace spolia {

/// Like std::vector<T> for trivially copyable T; no allocation up to N elements; a contiguous range, so that
/// it becomes a span by itself. Not thread-safe.
template <class T, size_t N>
class InlineVector {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  using value_type = T;
  using iterator = T*;
  using const_iterator = const T*;
  static constexpr size_t kMaxSize = std::numeric_limits<uint32_t>::max();

  InlineVector() {}
  explicit InlineVector(size_t count, T value = T()) : InlineVector() { resize(count, value); }
  InlineVector(std::initializer_list<T> values) : InlineVector(values.begin(), values.end()) {}
  explicit InlineVector(std::span<const T> values) : InlineVector(values.begin(), values.end()) {}
  template <std::input_iterator It>
  InlineVector(It first, It last) : InlineVector() {  // delegates, so that what is held goes if more throws
    assign(first, last);
  }
  InlineVector(const InlineVector& other) : InlineVector(other.begin(), other.end()) {}
  InlineVector(InlineVector&& other) noexcept { steal(other); }
  InlineVector& operator=(const InlineVector& other) {
    if (this != &other) assign(other.begin(), other.end());
    return *this;
  }
  InlineVector& operator=(InlineVector&& other) noexcept {
    if (this != &other) {
      release();
      steal(other);
    }
    return *this;
  }
  ~InlineVector() { release(); }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* data() { return capacity_ == N ? inline_ : heap_; }
  const T* data() const { return capacity_ == N ? inline_ : heap_; }
  T* begin() { return data(); }
  T* end() { return data() + size_; }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size_; }
  T& operator[](size_t i) { return data()[i]; }
  const T& operator[](size_t i) const { return data()[i]; }
  T& front() { return data()[0]; }
  const T& front() const { return data()[0]; }
  T& back() { return data()[size_ - 1]; }
  const T& back() const { return data()[size_ - 1]; }

  void clear() { size_ = 0; }
  void push_back(T value) {
    reserve(size_t{size_} + 1);
    data()[size_++] = value;
  }
  void pop_back() { --size_; }
  void resize(size_t count, T value = T()) {
    reserve(count);
    for (size_t i = size_; i < count; ++i) data()[i] = value;
    size_ = static_cast<uint32_t>(count);
  }
  template <class It>
  void assign(It first, It last) {
    clear();
    for (; first != last; ++first) push_back(*first);
  }
  iterator insert(const_iterator at, T value) {
    size_t i = static_cast<size_t>(at - begin());
    push_back(value);
    std::rotate(begin() + i, end() - 1, end());
    return begin() + i;
  }
  iterator erase(const_iterator at) {
    iterator p = begin() + (at - begin());
    std::copy(p + 1, end(), p);
    --size_;
    return p;
  }
  void reserve(size_t count) {
    if (count <= capacity_) return;
    if (count > kMaxSize) throw std::length_error("an InlineVector holds fewer than 2^32 elements");
    size_t grown = std::clamp(size_t{capacity_} * 2, count, kMaxSize);
    T* fresh = new T[grown];
    std::copy(begin(), end(), fresh);
    release();
    heap_ = fresh;
    capacity_ = static_cast<uint32_t>(grown);
  }

  friend bool operator==(const InlineVector& a, const InlineVector& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }
  friend auto operator<=>(const InlineVector& a, const InlineVector& b) {
    return std::lexicographical_compare_three_way(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  void release() {
    if (capacity_ != N) delete[] heap_;
    capacity_ = N;
  }
  void steal(InlineVector& other) {  // precondition: this owns nothing on the heap
    size_ = other.size_;
    capacity_ = other.capacity_;
    if (capacity_ == N) {
      std::copy(other.inline_, other.inline_ + size_, inline_);
    } else {
      heap_ = other.heap_;
    }
    other.size_ = 0;
    other.capacity_ = N;
  }

  uint32_t size_ = 0;
  uint32_t capacity_ = N;  // N exactly when the elements lie in place
  union {
    T inline_[N];
    T* heap_;
  };
};

}  // namespace spolia
