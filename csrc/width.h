// The width of a register in float32 numbers: the one place that knows it.
#pragma once

namespace kronecell {

// 16 (AVX-512 f, bw, vl, dq), 8 (AVX2 and FMA) or 4 (the baseline: SSE2 or NEON), found once per process. The environment
// variable KRONECELL_WIDTH lowers it; std::runtime_error says what is possible if its value is not.
int register_width();

// Whether it multiplies bytes and adds them up in registers of 512 bits (AVX-512 VNNI), and these are used.
bool multiplies_bytes();

}  // namespace kronecell
