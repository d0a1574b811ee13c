# The test program of csrc/cpu, without torch. Run by scripts/sanitize.

list(FILTER engine_cpu_sources INCLUDE REGEX "^csrc/cpu/")
add_executable(native_tests ${engine_cpu_sources}
  tests/native/attention_problem.cpp tests/native/main.cpp tests/native/naive_attention.cpp
  tests/native/test_attention.cpp tests/native/test_copies.cpp tests/native/test_time_buckets.cpp
  tests/native/threads.cpp)
target_compile_features(native_tests PRIVATE cxx_std_20)
target_compile_options(native_tests PRIVATE -g1 ${engine_warnings})
target_include_directories(native_tests PRIVATE csrc tests)
target_link_libraries(native_tests PRIVATE Threads::Threads)
if(ENGINE_SANITIZE)
  target_compile_options(native_tests PRIVATE
    "-fsanitize=${ENGINE_SANITIZE}" -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(native_tests PRIVATE "-fsanitize=${ENGINE_SANITIZE}")
endif()
