// What ThreadSanitizer is told about this room's tests: oneDNN is not instrumented, so that it does not see
// how that library guards what its threads share.

#if defined(__SANITIZE_THREAD__)
#define SPOLIA_THREAD_SANITIZER
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SPOLIA_THREAD_SANITIZER
#endif
#endif

#ifdef SPOLIA_THREAD_SANITIZER
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "called_from_lib:libdnnl.so\nrace:libdnnl.so\n";
}
#endif
