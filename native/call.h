/* CALL(name, ...) calls what name is for the processor at hand: name_avx512, name_avx2 or name_any. */
#if defined(__x86_64__)
#define CALL(name, ...)                                                                                                \
    (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&  \
             __builtin_cpu_supports("avx512dq")                                                                        \
         ? name##_avx512(__VA_ARGS__)                                                                                  \
     : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? name##_avx2(__VA_ARGS__)                      \
                                                                       : name##_any(__VA_ARGS__))
#else
#define CALL(name, ...) name##_any(__VA_ARGS__)
#endif
