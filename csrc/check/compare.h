// Numbers drawn for the kernels, and their results against sums in double.
#pragma once

#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

using Floats = std::vector<float>;

inline int failures = 0;
inline std::mt19937 generator(0);

inline Floats drawn(long size) {
    std::normal_distribution<float> normal;
    Floats numbers(size);
    for (float& number : numbers) number = normal(generator);
    return numbers;
}

// Sums in double with the sum of the sizes, by which errors are measured.
struct Sum {
    double value = 0, size = 0;
    void add(double a, double b) { value += a * b, size += std::fabs(a * b); }
};

inline void check(const std::string& what, const Floats& got, const std::vector<Sum>& want) {
    double worst = got.size() == want.size() ? 0 : 1;
    for (size_t i = 0; i < want.size() && i < got.size(); i++)
        worst = std::fmax(worst, std::fabs(got[i] - want[i].value) / (want[i].size + 1e-30));
    if (!(worst < 1e-6)) failures++, std::printf("wrong: %s, by %g\n", what.c_str(), worst);
}

void quantized_products();  // in quantized.cpp
