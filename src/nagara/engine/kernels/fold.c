/* Copies bytes and folds them into 64 lanes of 64 bits on the way, in one pass over memory.

   Word w of the bytes goes to lane w % 64:  lane = lane * P + word   (mod 2^64)

   P is odd, so that no change of a single word goes unnoticed, and the place of a word counts.
   Bytes that are missing of a whole row of 64 words count as zeros. Not against an adversary.

   The target is written past the processor's caches where it is aligned: nobody reads it soon. */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define P 0x9E3779B97F4A7C15ULL
#define ROW 512

typedef uint64_t V __attribute__((vector_size(64)));

static inline void put(uint8_t *to, V v) {
#if defined(__AVX512F__)
    _mm512_stream_si512((void *)to, (__m512i)v);
#elif defined(__AVX2__)
    __m256i halves[2];
    memcpy(halves, &v, 64);
    _mm256_stream_si256((__m256i *)to, halves[0]);
    _mm256_stream_si256((__m256i *)(to + 32), halves[1]);
#else
    memcpy(to, &v, 64);
#endif
}

void fold(uint8_t *to, const uint8_t *from, size_t size, uint64_t *lanes) {
    V a[8];
    const int streams = to && ((uintptr_t)to & 63) == 0;
    size_t at = 0;
    memcpy(a, lanes, sizeof a);
    for (; at + ROW <= size; at += ROW) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            V w;
            memcpy(&w, from + at + 64 * i, 64);
            a[i] = a[i] * P + w;
            if (streams)
                put(to + at + 64 * i, w);
        }
    }
    if (to && !streams)
        memcpy(to, from, at);
    if (at < size) {
        uint8_t last[ROW] = {0};
        V w[8];
        memcpy(last, from + at, size - at);
        memcpy(w, last, ROW);
        for (int i = 0; i < 8; i++)
            a[i] = a[i] * P + w[i];
        if (to)
            memcpy(to + at, from + at, size - at);
    }
#if defined(__AVX512F__) || defined(__AVX2__)
    _mm_sfence();
#endif
    memcpy(lanes, a, sizeof a);
}

/* Reads what the page cache has of a file, in pieces that stay in a core's cache until they are
   folded and copied. Returns how many bytes it had from `start` on, whole chunks unless all, or
   -errno. `lanes` gets 64 words for each chunk. */
long carry(int file, long start, size_t size, uint8_t *slot, size_t piece, size_t chunk,
           uint8_t *to, uint64_t *lanes) {
    for (size_t at = 0; at < size; at += chunk, lanes += 64) {
        const size_t whole = size - at < chunk ? size - at : chunk;
        memset(lanes, 0, 64 * sizeof *lanes);
        for (size_t in = 0; in < whole; in += piece) {
            const size_t want = whole - in < piece ? whole - in : piece;
            struct iovec into = {slot, want};
            const ssize_t got = preadv2(file, &into, 1, start + at + in, RWF_NOWAIT);
            if (got < 0 && errno != EAGAIN && errno != EINTR)
                return -errno;
            if (got != (ssize_t)want)
                return at;
            fold(to ? to + at + in : NULL, slot, want, lanes);
        }
    }
    return size;
}
