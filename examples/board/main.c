/* Frames come from a file of the host, by semihosting, as they would from a camera: one at a time. The chances of every
   clip go to another file, and at the end the bytes of the stack. Build with -DSEGMENTS=10 -DSTEPS=6 as the model has it. */
#include "clips.h"

uint32_t stack_bytes(void);

static clips_state state;
static uint8_t frame[CLIPS_INPUTS]; /* beside the network: a camera's own memory */
static float scores[CLIPS_OUTPUTS], chances[CLIPS_OUTPUTS];

static int32_t host(uint32_t what, const void *with)
{
    register uint32_t operation __asm("r0") = what;
    register const void *arguments __asm("r1") = with;
    __asm volatile("bkpt 0xAB" : "+r"(operation) : "r"(arguments) : "memory");
    return (int32_t)operation;
}

static int32_t open_file(const char *name, uint32_t length, uint32_t mode)
{
    const uint32_t with[3] = {(uint32_t)name, mode, length};
    return host(0x01, with);
}

/* Bytes that were not read or written. */
static int32_t moved(uint32_t what, int32_t file, const void *data, uint32_t bytes)
{
    const uint32_t with[3] = {(uint32_t)file, (uint32_t)data, bytes};
    return host(what, with);
}

static void stop(uint32_t reason)
{
    host(0x18, (const void *)reason);
}

int main(void)
{
    const int32_t in = open_file("frames.bin", 10, 1), out = open_file("chances.bin", 11, 5);
    if (in < 0 || out < 0)
        stop(0x20023);
    for (;;) {
        for (uint32_t k = 0; k < CLIPS_OUTPUTS; k++)
            chances[k] = 0.0f;
        for (uint32_t segment = 0; segment < SEGMENTS; segment++) {
            clips_reset(&state);
            for (uint32_t step = 0; step < STEPS; step++) {
                if (moved(0x06, in, frame, sizeof frame) != 0) {
                    const uint32_t used = stack_bytes();
                    moved(0x05, out, &used, sizeof used);
                    stop(0x20026); /* ADP_Stopped_ApplicationExit */
                }
                clips_step(&state, frame, step + 1 < STEPS ? 0 : scores);
            }
            clips_add(scores, SEGMENTS, chances);
        }
        moved(0x05, out, chances, sizeof chances);
    }
}
