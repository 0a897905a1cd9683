#include "spolia/device/cuda.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

#include "spolia/base/error.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

constexpr unsigned kNonBlocking = 1;    // CU_STREAM_NON_BLOCKING
constexpr unsigned kWithoutTiming = 2;  // CU_EVENT_DISABLE_TIMING
constexpr int64_t kMostPitch = INT32_MAX;

uint64_t number_of(const std::byte* memory) { return reinterpret_cast<uint64_t>(memory); }

void* context_of(const CudaDriver& driver, int index) {
  const Device device{DeviceKind::kCuda, index};
  int count = 0, handle = 0;
  void* context = nullptr;
  if (driver.device_count(&count) != kCudaSuccess) count = 0;
  if (index < 0 || index >= count) {
    throw UnsupportedError("there is no device {} here: CUDA has {} devices", name_of(device), count);
  }
  if (driver.device(&handle, index) != kCudaSuccess ||
      driver.retain_context(&context, handle) != kCudaSuccess) {
    throw UnsupportedError("the device {} cannot be used: CUDA gives no context", name_of(device));
  }
  return context;
}

}  // namespace

CudaBackend::Current::Current(const CudaBackend& backend) : driver_(backend.driver_) {
  backend.check(driver_.push_context(backend.context_), "make a context current");
}

CudaBackend::Current::~Current() {
  void* ignored = nullptr;
  driver_.pop_context(&ignored);
}

CudaBackend::CudaBackend(const CudaDriver& driver, int index)
    : driver_(driver), index_(index), context_(context_of(driver, index)) {
  const Current current(*this);
  check(driver_.create_stream(&stream_, kNonBlocking), "make a stream");
}

void CudaBackend::check(int error, const char* what) const {
  if (error == kCudaSuccess) return;
  const char* text = nullptr;
  driver_.error_text(error, &text);
  throw IoError("{}: cannot {}: {} (CUDA error {})", name_of(device()), what,
                text == nullptr ? "unknown error" : text, error);
}

std::byte* CudaBackend::allocate(int64_t bytes) const {
  const Current current(*this);
  uint64_t memory = 0;
  const int error = driver_.allocate(&memory, static_cast<size_t>(std::max<int64_t>(bytes, 1)), stream_);
  if (error == kCudaOutOfMemory) {
    throw IoError("cannot get {} of memory on {}", human_bytes(bytes), name_of(device()));
  }
  check(error, "allocate memory");
  check(driver_.finish_stream(stream_), "allocate memory");  // then other streams may use it
  return reinterpret_cast<std::byte*>(memory);
}

void CudaBackend::release(std::byte* memory, int64_t) const noexcept {
  try {
    const Current current(*this);
    driver_.release(number_of(memory), stream_);
  } catch (...) {  // the device is lost, and its memory with it
  }
}

void CudaBackend::copy(std::byte* dst, const std::byte* src, int64_t bytes) const {
  if (bytes == 0) return;
  const Current current(*this);
  check(driver_.copy(number_of(dst), number_of(src), static_cast<size_t>(bytes), stream_), "copy");
  check(driver_.finish_stream(stream_), "copy");
}

void CudaBackend::copy_from_host(std::byte* dst, const std::byte* src, int64_t bytes) const {
  copy(dst, src, bytes);
}

void CudaBackend::copy_to_host(std::byte* dst, const std::byte* src, int64_t bytes) const {
  copy(dst, src, bytes);
}

void CudaBackend::copy_rows(std::byte* dst, int64_t dst_pitch, const std::byte* src, int64_t src_pitch,
                            int64_t row_bytes, int64_t rows) const {
  if (row_bytes == 0 || rows == 0) return;
  const Current current(*this);
  const bool pitched = std::min(dst_pitch, src_pitch) >= row_bytes &&
                       std::max({dst_pitch, src_pitch, row_bytes}) <= kMostPitch;
  if (pitched) {
    CudaCopy2d copy;
    copy.src = number_of(src);
    copy.src_pitch = static_cast<size_t>(src_pitch);
    copy.dst = number_of(dst);
    copy.dst_pitch = static_cast<size_t>(dst_pitch);
    copy.width = static_cast<size_t>(row_bytes);
    copy.height = static_cast<size_t>(rows);
    check(driver_.copy_2d(&copy, stream_), "copy rows");
  } else {
    for (int64_t row = 0; row < rows; ++row) {
      check(driver_.copy(number_of(dst + row * dst_pitch), number_of(src + row * src_pitch),
                         static_cast<size_t>(row_bytes), stream_),
            "copy rows");
    }
  }
  check(driver_.finish_stream(stream_), "copy rows");
}

void CudaBackend::wait_for(DeviceEvent event) const {
  if (event.handle == nullptr) return;
  const Current current(*this);
  check(driver_.finish_event(event.handle), "wait for an event");
}

const CudaBackend& cuda_backend(int index) {
  // Never destroyed: buffers of static lifetime give their memory back late.
  static std::mutex& mutex = *new std::mutex;
  static auto& backends = *new std::map<int, std::unique_ptr<CudaBackend>>;
  const std::lock_guard lock(mutex);
  const auto at = backends.find(index);
  if (at != backends.end()) return *at->second;
  const CudaDriver* driver = nullptr;
  try {
    driver = &cuda_driver();
  } catch (const UnsupportedError& error) {
    throw UnsupportedError("there is no device {} here: {}", name_of({DeviceKind::kCuda, index}),
                           error.what());
  }
  auto backend = std::make_unique<CudaBackend>(*driver, index);
  return *backends.emplace(index, std::move(backend)).first->second;
}

PinnedBuffer::PinnedBuffer(const CudaBackend& backend, int64_t bytes) : backend_(backend) {
  const CudaBackend::Current current(backend_);
  void* memory = nullptr;
  backend_.check(backend_.driver().allocate_pinned(&memory, static_cast<size_t>(std::max<int64_t>(bytes, 1))),
                 "pin host memory");
  data_ = static_cast<std::byte*>(memory);
}

PinnedBuffer::~PinnedBuffer() {
  try {
    const CudaBackend::Current current(backend_);
    backend_.driver().release_pinned(data_);
  } catch (...) {
  }
}

CudaStream::CudaStream(const CudaBackend& backend) : backend_(backend) {
  const CudaBackend::Current current(backend_);
  backend_.check(backend_.driver().create_stream(&stream_, kNonBlocking), "make a stream");
}

CudaStream::~CudaStream() {
  try {
    const CudaBackend::Current current(backend_);
    backend_.driver().destroy_stream(stream_);
  } catch (...) {
  }
}

void CudaStream::copy(std::byte* dst, const std::byte* src, int64_t bytes) {
  if (bytes == 0) return;
  const CudaBackend::Current current(backend_);
  backend_.check(backend_.driver().copy(number_of(dst), number_of(src), static_cast<size_t>(bytes), stream_),
                 "copy");
}

void CudaStream::wait_for(DeviceEvent event) {
  if (event.handle == nullptr) return;
  const CudaBackend::Current current(backend_);
  backend_.check(backend_.driver().wait_in_stream(stream_, event.handle, 0), "wait for an event");
}

void CudaStream::run_on_host(void (*function)(void*), void* argument) {
  const CudaBackend::Current current(backend_);
  backend_.check(backend_.driver().run_on_host(stream_, function, argument), "queue a function");
}

CudaEvent::CudaEvent(const CudaBackend& backend) : backend_(backend) {
  const CudaBackend::Current current(backend_);
  backend_.check(backend_.driver().create_event(&event_, kWithoutTiming), "make an event");
}

CudaEvent::~CudaEvent() {
  try {
    const CudaBackend::Current current(backend_);
    backend_.driver().destroy_event(event_);
  } catch (...) {
  }
}

void CudaEvent::record(const CudaStream& stream) {
  const CudaBackend::Current current(backend_);
  backend_.check(backend_.driver().record_event(event_, stream.handle()), "record an event");
}

bool CudaEvent::has_happened() const {
  const CudaBackend::Current current(backend_);
  const int error = backend_.driver().query_event(event_);
  if (error == kCudaNotReady) return false;
  backend_.check(error, "carry out what was queued");
  return true;
}

}  // namespace spolia
