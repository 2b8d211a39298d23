// Compiles KERNEL_FILE once for each register width of the architecture, in kronecell::width16, width8 and width4:
//
//   #define KERNEL_FILE "fold_kernel.h"
//   #include "widths.h"
//
// Several kernel files may follow each other in one translation unit. A kernel file is included inside a namespace and
// under a target pragma: it includes nothing and instantiates no template of the standard library, because the linker
// would merge the AVX-512 instance with the same instance elsewhere, and an older processor would run it. Its names have
// internal linkage. It finds LANES, ROWS and all of micro.h.
//
// CALL(name, ...) calls name(...) of the width that register_width() says.

#ifndef KRONECELL_WIDTHS
#define KRONECELL_WIDTHS

#include <cstdint>
#include <cstring>

#include "buffer.h"
#include "operands.h"
#include "width.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__clang__)
#define KRONECELL_PRAGMA(text) _Pragma(#text)
#define UNROLL(n) KRONECELL_PRAGMA(clang loop unroll_count(n))
#else
#define KRONECELL_PRAGMA(text) _Pragma(#text)
#define UNROLL(n) KRONECELL_PRAGMA(GCC unroll n)
#endif

// Functions of a kernel file: inlined into their caller, or never, where a large caller would make the compiler spill sums.
#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline))
#define INLINE_MEMBER inline __attribute__((always_inline))

#if defined(__x86_64__)
#define CALL(name, ...)                                                              \
    (::kronecell::register_width() == 16  ? ::kronecell::width16::name(__VA_ARGS__)  \
     : ::kronecell::register_width() == 8 ? ::kronecell::width8::name(__VA_ARGS__)   \
                                          : ::kronecell::width4::name(__VA_ARGS__))
#else
#define CALL(name, ...) ::kronecell::width4::name(__VA_ARGS__)
#endif

#define WIDTHS_FIRST_INCLUSION
#endif  // KRONECELL_WIDTHS

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma")
#endif
#define KERNEL_WIDTH 16
namespace kronecell {
namespace width16 {
namespace {
#ifdef WIDTHS_FIRST_INCLUSION
#include "micro.h"
#endif
#include KERNEL_FILE
}  // namespace
}  // namespace width16
}  // namespace kronecell
#undef KERNEL_WIDTH
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define KERNEL_WIDTH 8
namespace kronecell {
namespace width8 {
namespace {
#ifdef WIDTHS_FIRST_INCLUSION
#include "micro.h"
#endif
#include KERNEL_FILE
}  // namespace
}  // namespace width8
}  // namespace kronecell
#undef KERNEL_WIDTH
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // __x86_64__

#define KERNEL_WIDTH 4
namespace kronecell {
namespace width4 {
namespace {
#ifdef WIDTHS_FIRST_INCLUSION
#include "micro.h"
#endif
#include KERNEL_FILE
}  // namespace
}  // namespace width4
}  // namespace kronecell
#undef KERNEL_WIDTH
#undef KERNEL_FILE
#undef WIDTHS_FIRST_INCLUSION
