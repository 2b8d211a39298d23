/* From reset to main on a Cortex-M4 or M7: the floating point unit, memory of zeros, a painted stack. */
#include <stdint.h>

#define STACK_PAINT 0x5a5a5a5au

extern uint32_t end_of_data[], start_of_stack[], end_of_paint[], end_of_ram[];
int main(void);

/* Bytes of the stack that were ever used. */
uint32_t stack_bytes(void)
{
    const uint32_t *word = start_of_stack;
    while (word < end_of_ram && *word == STACK_PAINT)
        word++;
    return 4u * (uint32_t)(end_of_ram - word);
}

void start(void)
{
    *(volatile uint32_t *)0xE000ED88u |= 0xFu << 20; /* CPACR: full access to the floating point unit */
    __asm volatile("dsb\n isb");
    for (volatile uint32_t *word = (uint32_t *)0x20000000u; word < end_of_data; word++)
        *word = 0;
    for (volatile uint32_t *word = start_of_stack; word < end_of_paint; word++)
        *word = STACK_PAINT;
    main();
    for (;;) {
    }
}

static void fault(void)
{
    register uint32_t operation __asm("r0") = 0x18; /* SYS_EXIT, with a reason that is no normal end */
    register uint32_t reason __asm("r1") = 0x20023;
    __asm volatile("bkpt 0xAB" : : "r"(operation), "r"(reason));
    for (;;) {
    }
}

__attribute__((section(".vectors"), used)) static void *const vectors[16] = {
    end_of_ram, (void *)start, (void *)fault, (void *)fault, (void *)fault, (void *)fault, (void *)fault,
};
