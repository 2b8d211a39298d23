// Whether what the kernels follow in prepared entries stays inside; a kernel file, see widths.h.

// Of the entries from `first` up to `last`: whether they are of these outputs and inputs.
INLINE bool places_are_sound(const uint32_t* at, long first, long last, long outputs, long inputs) {
    uint32_t most = 0, lane = 0;
    for (long e = first; e < last; e++) {
        const uint32_t here = at[e] % (1 << Windows::LANE_BITS);
        most = at[e] > most ? at[e] : most;
        lane = here > lane ? here : lane;
    }
    return first == last || (lane < outputs && most >> Windows::LANE_BITS < inputs);
}

// With `many` rows, entries are also read by output.
bool windows_are_sound(const Windows& w, long entries, long outputs, long inputs, bool many) {
    const uint16_t* masks = w.masks;
    const int32_t* ends = w.ends;
    long e = 0;
    for (long b = 0; b < w.bundles; b++, ends += Windows::OUTPUTS, outputs -= Windows::OUTPUTS) {
        const long left = w.left[b], all = ends[Windows::OUTPUTS - 1];
        if (left < 0 || all < 0 || left > entries - e || all > entries - e - left) return false;
        long taken = 0, beyond = 0;
        for (long t = 0; t < w.turns; t++, masks += Windows::MASKS) {
            uint64_t four, two;
            memcpy(&four, masks, sizeof four), memcpy(&two, masks + 4, sizeof two);
            taken += __builtin_popcountll(four) + __builtin_popcountll(two);
            beyond |= (long)(two >> 32);  // masks without a group
        }
        if (taken != all || beyond) return false;
        const long some = outputs < Windows::OUTPUTS ? outputs : Windows::OUTPUTS;
        if (!places_are_sound(w.at, e, e + left + (many ? all : 0), some, inputs)) return false;
        if (many) {
            bool ascend = ends[0] >= 0;
            for (long i = 1; i < Windows::OUTPUTS; i++) ascend &= ends[i] >= ends[i - 1];
            if (!ascend) return false;
        }
        e += left + all;
    }
    return e == entries;
}
