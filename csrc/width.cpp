#include "width.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace kronecell {

static int widest() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma"))
        return 16;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 8;
#endif
    return 4;
}

static int chosen() {
    const int most = widest();
    const char* wish = std::getenv("KRONECELL_WIDTH");
    if (!wish || !*wish) return most;
    std::string possible;
    for (int width = 4; width <= most; width *= 2) {
        if (wish == std::to_string(width)) return width;
        possible += (possible.empty() ? "" : ", ") + std::to_string(width);
    }
    throw std::runtime_error(std::string("KRONECELL_WIDTH is \"") + wish + "\"; this processor can do " + possible);
}

bool multiplies_bytes() {
#if defined(__x86_64__)
    static const bool has = __builtin_cpu_supports("avx512vnni");
    return has && register_width() == 16;
#else
    return false;
#endif
}

int register_width() {
    static const int width = chosen();  // tried again at the next call if it throws
    return width;
}

}  // namespace kronecell
