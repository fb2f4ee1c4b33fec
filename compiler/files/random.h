/* The random numbers of Python's `Random`: MT19937 (Matsumoto and Nishimura, 1998). */

#include <stdint.h>

enum { WORDS = 624, SHIFT = 397 };

typedef struct {
    uint32_t word[WORDS], next; /* as in `Random.getstate` */
} Draw;

static uint32_t word_of(Draw *draw) {
    if (draw->next >= WORDS) {
        for (int i = 0; i < WORDS; i++) {
            uint32_t y = (draw->word[i] & 0x80000000u) | (draw->word[(i + 1) % WORDS] & 0x7fffffffu);
            draw->word[i] = draw->word[(i + SHIFT) % WORDS] ^ (y >> 1) ^ (y & 1 ? 0x9908b0dfu : 0);
        }
        draw->next = 0;
    }
    uint32_t y = draw->word[draw->next++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

/* `Random.random` */
static double share(Draw *draw) {
    uint32_t high = word_of(draw) >> 5, low = word_of(draw) >> 6;
    return (high * 67108864.0 + low) * (1.0 / 9007199254740992.0);
}
