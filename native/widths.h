/* Includes KERNEL once for every width of registers: LANES numbers, ROWS at once by two registers of columns, as many as
 * leave registers for the rest. Its functions are called NAME(...) and have the attribute TARGET. */
#if defined(__x86_64__)
#define LANES 16
#define ROWS 12
#define NAME(name) name##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
#include KERNEL
#undef LANES
#undef ROWS
#undef NAME
#undef TARGET

#define LANES 8
#define ROWS 6
#define NAME(name) name##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#include KERNEL
#undef LANES
#undef ROWS
#undef NAME
#undef TARGET
#endif

#define LANES 4
#define ROWS 6
#define NAME(name) name##_any
#define TARGET
#include KERNEL

#include "call.h"
