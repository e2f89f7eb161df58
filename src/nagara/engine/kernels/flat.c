/* One step of a Llama-family decoder: rows of many sequences in, logits out, over a paged cache.
 *
 * Compiled twice, with -DBF16=1 (weights, cache and the inputs of products in bfloat16, sums and
 * the residual in float) and with -DBF16=0 (all float). Weights are read as they lie in the file:
 * row-major [out, in], any alignment of their element type.
 *
 * Every row is computed the same way whatever rows stand beside it: each output is one dot product
 * in one order, each row attends to its tokens in one order. So results do not depend on the batch,
 * on chunking, or on the number of threads.
 *
 * Wanted of the shapes (checked by the caller): every product's inner size is a multiple of 32, the
 * head's size a multiple of 16.
 */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

enum { BLOCK = 16, LANES = 16, TILE = 4, CHUNK = 16 };

typedef float v16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t i16v __attribute__((vector_size(64), aligned(4)));
typedef uint32_t u16v __attribute__((vector_size(64), aligned(4)));
typedef uint16_t half16 __attribute__((vector_size(32), aligned(2)));

#if BF16
typedef uint16_t number;
static inline float to_float(number x) {
    uint32_t bits = (uint32_t)x << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}
static inline number from_float(float x) { /* to the nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (number)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static inline v16 load16(const number *p) {
    return (v16)(__builtin_convertvector(*(const half16 *)p, u16v) << 16);
}
static inline void store16(number *p, v16 x) {
    u16v bits = (u16v)x;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    *(half16 *)p = __builtin_convertvector(bits, half16);
}
#else
typedef float number;
static inline float to_float(number x) { return x; }
static inline number from_float(float x) { return x; }
static inline v16 load16(const number *p) { return *(const v16 *)p; }
static inline void store16(number *p, v16 x) { *(v16 *)p = x; }
#endif

typedef struct {
    const number *weight, *bias;
} Linear;

typedef struct {
    const number *input_norm;
    Linear q, k, v, o;
    const number *q_norm, *k_norm, *mlp_norm;
    Linear gate, up, down;
} Layer;

typedef struct {
    int64_t layers, hidden, heads, kv_heads, dim, inner, vocab;
    int64_t window;  /* 0: none */
    int64_t is_gelu; /* 0: SiLU */
    int64_t cache_layer; /* elements of one layer's keys (or values) in the cache */
    float eps, norm_offset, embed_scale, angle_scale;
} Shape;

typedef struct {
    int64_t rows, samples, table_width, threads, context;
    const int64_t *ids, *positions, *row_run, *sample_rows;
    const int32_t *table;
    const float *frequencies; /* [dim / 2] */
    float *logits;            /* [samples, vocab] */
    /* Scratch, for at least `rows` rows */
    float *x;      /* [rows, hidden]: the residual stream */
    float *qkv;    /* [rows, (heads + 2 kv_heads) dim] */
    float *angles; /* [rows, dim]: cosines, then sines */
    float *scores; /* [threads, 4, context] */
    number *input; /* [rows, widest product input] */
    number *inner; /* [rows, inner] */
    number *keys, *values; /* cache: [layer][block][kv head][dim][16] and [...][16][dim] */
} Step;

/* Lane i of the result is the sum of the lanes of vi. */
#ifdef __AVX512F__
static inline __m512 fold_singles(v16 a, v16 b) {
    return _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b),
                         _mm512_unpackhi_ps((__m512)a, (__m512)b));
}
static inline __m512 fold_pairs(__m512 a, __m512 b) {
    return _mm512_add_ps((__m512)_mm512_unpacklo_pd((__m512d)a, (__m512d)b),
                         (__m512)_mm512_unpackhi_pd((__m512d)a, (__m512d)b));
}
static inline __m512 fold_quarters(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
static inline v16 sum_lanes(v16 v0, v16 v1, v16 v2, v16 v3, v16 v4, v16 v5, v16 v6, v16 v7, v16 v8,
                            v16 v9, v16 v10, v16 v11, v16 v12, v16 v13, v16 v14, v16 v15) {
    __m512 a = fold_pairs(fold_singles(v0, v1), fold_singles(v2, v3));
    __m512 b = fold_pairs(fold_singles(v4, v5), fold_singles(v6, v7));
    __m512 c = fold_pairs(fold_singles(v8, v9), fold_singles(v10, v11));
    __m512 d = fold_pairs(fold_singles(v12, v13), fold_singles(v14, v15));
    return (v16)fold_quarters(fold_quarters(a, b), fold_quarters(c, d));
}
#else
static inline float sum16(v16 v);
static inline v16 sum_lanes(v16 v0, v16 v1, v16 v2, v16 v3, v16 v4, v16 v5, v16 v6, v16 v7, v16 v8,
                            v16 v9, v16 v10, v16 v11, v16 v12, v16 v13, v16 v14, v16 v15) {
    return (v16){sum16(v0),  sum16(v1),  sum16(v2),  sum16(v3), sum16(v4),  sum16(v5),
                 sum16(v6),  sum16(v7),  sum16(v8),  sum16(v9), sum16(v10), sum16(v11),
                 sum16(v12), sum16(v13), sum16(v14), sum16(v15)};
}
#endif

static inline v16 larger(v16 a, v16 b) {
    i16v is_a = a > b;
    return (v16)(((i16v)a & is_a) | ((i16v)b & ~is_a));
}

static inline float sum16(v16 v) {
    float s[LANES];
    memcpy(s, &v, sizeof s);
    for (int width = LANES / 2; width; width /= 2)
        for (int j = 0; j < width; j++) s[j] += s[j + width];
    return s[0];
}

/* e^x with a relative error of about 2e-7: 2^n times a polynomial of the rest. */
static inline v16 exp16(v16 x) {
    const v16 least = (v16){0} - 87.0f, most = (v16){0} + 88.0f;
    x = larger(x, least);
    x = -larger(-x, -most);
    v16 n = x * 1.44269504f + 12582912.0f; /* the constant rounds to a whole number */
    i16v whole = (i16v)n << 23;
    n -= 12582912.0f;
    v16 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    v16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return (v16)((i16v)p + whole);
}

#if BF16 && defined(__AVX512BF16__)
enum { STRIDE = 32 }; /* elements of one vector of a product */
typedef __m512bh several;
#define LOAD(p) ((__m512bh)_mm512_loadu_si512(p))
#define DOT(sum, x, y) ((v16)_mm512_dpbf16_ps((__m512)(sum), x, y))
/* Without this GCC loads the same vectors again for each product. */
#define KEEP(a, b, c, d) __asm__("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d))
#else
#define KEEP(a, b, c, d)
enum { STRIDE = LANES };
typedef v16 several;
#define LOAD(p) load16(p)
#define DOT(sum, x, y) ((sum) + (x) * (y))
#endif

/* Where the four rows of one side of a tile begin. Missing rows repeat the first one. */
typedef struct {
    const number *row[TILE];
} Rows;

static inline Rows rows_from(const number *first, int64_t stride, int64_t count) {
    Rows out;
    for (int64_t i = 0; i < TILE; i++) out.row[i] = first + (i < count ? i : 0) * stride;
    return out;
}

/* The sixteen dot products of four rows with four rows, row-major. The sums have names of their
 * own because an array of them would live on the stack. On the way one row of what comes next is
 * asked for: each row is too short for the hardware to notice a pattern, and asking for all at once
 * would stall. */
static inline v16 tile(Rows a, Rows w, int64_t k, const number *ahead) {
#define SUMS(m) v16 s##m##0 = {0}, s##m##1 = {0}, s##m##2 = {0}, s##m##3 = {0};
#define MULTIPLY(m)                                                                                \
    {                                                                                              \
        several x = LOAD(a.row[m] + i);                                                            \
        s##m##0 = DOT(s##m##0, x, y0);                                                             \
        s##m##1 = DOT(s##m##1, x, y1);                                                             \
        s##m##2 = DOT(s##m##2, x, y2);                                                             \
        s##m##3 = DOT(s##m##3, x, y3);                                                             \
    }
    SUMS(0) SUMS(1) SUMS(2) SUMS(3)
    for (int64_t i = 0; i < k; i += STRIDE) {
        __builtin_prefetch(ahead + i, 0, 2);
        several y0 = LOAD(w.row[0] + i), y1 = LOAD(w.row[1] + i);
        several y2 = LOAD(w.row[2] + i), y3 = LOAD(w.row[3] + i);
        KEEP(y0, y1, y2, y3);
        MULTIPLY(0) MULTIPLY(1) MULTIPLY(2) MULTIPLY(3)
    }
#undef SUMS
#undef MULTIPLY
    return sum_lanes(s00, s01, s02, s03, s10, s11, s12, s13, s20, s21, s22, s23, s30, s31, s32,
                     s33);
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The rows that come after those being multiplied, handed out one for each tile. */
typedef struct {
    const number *next, *end;
    int64_t k;
} Ahead;

static inline const number *take(Ahead *ahead) {
    const number *row = ahead->next;
    if (row < ahead->end) ahead->next += ahead->k;
    return row;
}

/* `count` rows from `first` on come next; `tiles` of them can be asked for one by one, the others
 * at once. */
static inline Ahead rows_ahead(const number *first, int64_t count, int64_t k, int64_t tiles) {
    Ahead out = {first, first + count * k, k};
    while ((out.end - out.next) / k > tiles) {
        for (int64_t i = 0; i < k; i += 64 / (int64_t)sizeof(number))
            __builtin_prefetch(out.next + i, 0, 2);
        out.next += k;
    }
    return out;
}

static inline v16 with_bias(v16 sums, const number *bias, int64_t width) {
    if (bias)
        for (int i = 0; i < LANES; i++) sums[i] += i % TILE < width ? to_float(bias[i % TILE]) : 0;
    return sums;
}

/* Outputs [first, first + CHUNK) of one linear layer for all rows; `add` adds to what is there.
 * Pairs of tiles share the rows of `a` while these are near. */
static void product(const number *a, int64_t rows, int64_t k, Linear linear, int64_t outputs,
                    int64_t first, float *out, int64_t ldo, int add) {
    int64_t last = least(first + CHUNK, outputs);
    for (int64_t pair = first; pair < last; pair += 2 * TILE) {
        int64_t after = least(pair + 2 * TILE, outputs);
        Ahead ahead = rows_ahead(linear.weight + after * k, least(2 * TILE, outputs - after), k,
                                 2 * ((rows + TILE - 1) / TILE));
        for (int64_t m = 0; m < rows; m += TILE) {
            int64_t height = least(TILE, rows - m);
            Rows x = rows_from(a + m * k, k, height);
            for (int64_t n = pair; n < least(pair + 2 * TILE, last); n += TILE) {
                int64_t width = least(TILE, last - n);
                v16 sums = tile(x, rows_from(linear.weight + n * k, k, width), k, take(&ahead));
                sums = with_bias(sums, linear.bias ? linear.bias + n : 0, width);
                for (int64_t i = 0; i < height; i++) {
                    float *to = out + (m + i) * ldo + n;
                    for (int64_t j = 0; j < width; j++)
                        to[j] = add ? to[j] + sums[i * TILE + j] : sums[i * TILE + j];
                }
            }
        }
    }
}

static inline v16 activate(v16 x, int64_t is_gelu) {
    v16 inner = is_gelu ? 1.5957691216f * (x + 0.044715f * x * x * x) : x;
    return x / (1.0f + exp16(-inner)); /* tanh form of GELU: x times a logistic function too */
}

/* Inner activations [first, first + CHUNK): activation(gate) times up. */
static void gated_product(const Shape *s, const number *a, int64_t rows, const Layer *layer,
                          int64_t first, number *out) {
    int64_t k = s->hidden, last = least(first + CHUNK, s->inner);
    for (int64_t n = first; n < last; n += TILE) {
        Rows gate = rows_from(layer->gate.weight + n * k, k, TILE);
        Rows up = rows_from(layer->up.weight + n * k, k, TILE);
        int64_t after = least(n + TILE, s->inner), tiles = (rows + TILE - 1) / TILE;
        Ahead gates = rows_ahead(layer->gate.weight + after * k, least(TILE, s->inner - after), k,
                                 tiles);
        Ahead ups = rows_ahead(layer->up.weight + after * k, least(TILE, s->inner - after), k,
                               tiles);
        for (int64_t m = 0; m < rows; m += TILE) {
            int64_t height = least(TILE, rows - m);
            Rows x = rows_from(a + m * k, k, height);
            v16 g = tile(x, gate, k, take(&gates)), u = tile(x, up, k, take(&ups));
            g = with_bias(g, layer->gate.bias ? layer->gate.bias + n : 0, TILE);
            u = with_bias(u, layer->up.bias ? layer->up.bias + n : 0, TILE);
            v16 both = activate(g, s->is_gelu) * u;
            for (int64_t i = 0; i < height; i++)
                for (int64_t j = 0; j < TILE; j++)
                    out[(m + i) * s->inner + n + j] = from_float(both[i * TILE + j]);
        }
    }
}

/* out = x / rms(x) * (offset + weight), over `size` numbers. */
static inline float inverse_rms(const float *x, int64_t size, float eps) {
    v16 sum = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        v16 v = *(const v16 *)(x + i);
        sum += v * v;
    }
    return 1.0f / sqrtf(sum16(sum) / (float)size + eps);
}

static void norm_row(const Shape *s, const float *x, const number *weight, number *out) {
    float scale = inverse_rms(x, s->hidden, s->eps);
    for (int64_t i = 0; i < s->hidden; i += LANES)
        store16(out + i, *(const v16 *)(x + i) * scale * (load16(weight + i) + s->norm_offset));
}

static void norm_head(const Shape *s, float *x, const number *weight) {
    if (!weight) return;
    float scale = inverse_rms(x, s->dim, s->eps);
    for (int64_t i = 0; i < s->dim; i += LANES)
        *(v16 *)(x + i) = *(const v16 *)(x + i) * scale * (load16(weight + i) + s->norm_offset);
}

static void turn_head(const Shape *s, float *x, const float *angles) {
    int64_t half = s->dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half], c = angles[i], d = angles[half + i];
        x[i] = a * c - b * d;
        x[i + half] = b * c + a * d;
    }
}

/* Norm and turn a row's queries and keys; put its keys and values into the cache. */
static void place_row(const Shape *s, const Step *step, const Layer *layer, int64_t row,
                      number *keys, number *values) {
    int64_t dim = s->dim, position = step->positions[row];
    float *q = step->qkv + row * (s->heads + 2 * s->kv_heads) * dim;
    float *k = q + s->heads * dim, *v = k + s->kv_heads * dim;
    const float *angles = step->angles + row * dim;
    const int32_t *table = step->table + step->row_run[row] * step->table_width;
    int64_t block = table[position / BLOCK], at = position % BLOCK;
    float scale = 1.0f / sqrtf((float)dim);
    for (int64_t h = 0; h < s->heads; h++) {
        norm_head(s, q + h * dim, layer->q_norm);
        turn_head(s, q + h * dim, angles);
        for (int64_t d = 0; d < dim; d++)
            q[h * dim + d] = to_float(from_float(q[h * dim + d])) * scale;
    }
    for (int64_t h = 0; h < s->kv_heads; h++) {
        norm_head(s, k + h * dim, layer->k_norm);
        turn_head(s, k + h * dim, angles);
        number *to_k = keys + (block * s->kv_heads + h) * dim * BLOCK + at;
        number *to_v = values + ((block * s->kv_heads + h) * BLOCK + at) * dim;
        for (int64_t d = 0; d < dim; d++) {
            to_k[d * BLOCK] = from_float(k[h * dim + d]);
            to_v[d] = from_float(v[h * dim + d]);
        }
    }
}

/* `heads` query heads of one row over the tokens [begin, end) of one kv head. */
static inline __attribute__((always_inline)) void attend(const int heads, const float *q,
                                                         int64_t dim, const number *keys,
                                                         const number *values, int64_t stride,
                                                         const int32_t *table, int64_t begin,
                                                         int64_t end, float *scores,
                                                         int64_t context, number *out) {
    int64_t first = begin / BLOCK, last = (end + BLOCK - 1) / BLOCK;
    float inverse[4];
    for (int64_t b = first; b < last; b++) {
        const number *k = keys + table[b] * stride;
        v16 sums[4] = {{0}}, more[4] = {{0}};
        for (int64_t d = 0; d < dim; d += 2) {
            v16 k0 = load16(k + d * BLOCK), k1 = load16(k + (d + 1) * BLOCK);
            for (int h = 0; h < heads; h++) {
                sums[h] += q[h * dim + d] * k0;
                more[h] += q[h * dim + d + 1] * k1;
            }
        }
        for (int h = 0; h < heads; h++) *(v16 *)(scores + h * context + b * BLOCK) = sums[h] + more[h];
    }
    for (int h = 0; h < heads; h++) {
        float *line = scores + h * context;
        for (int64_t t = first * BLOCK; t < begin; t++) line[t] = -INFINITY;
        for (int64_t t = end; t < last * BLOCK; t++) line[t] = -INFINITY;
        v16 top = *(const v16 *)(line + first * BLOCK);
        for (int64_t b = first + 1; b < last; b++) {
            v16 some = *(const v16 *)(line + b * BLOCK);
            top = larger(some, top);
        }
        float highest = top[0];
        for (int i = 1; i < LANES; i++) highest = top[i] > highest ? top[i] : highest;
        v16 total = {0};
        for (int64_t b = first; b < last; b++) {
            v16 *some = (v16 *)(line + b * BLOCK);
            *some = exp16(*some - highest); /* hidden tokens get e^-87: nothing, in float */
            total += *some;
        }
        inverse[h] = 1.0f / sum16(total);
    }
    for (int64_t part = 0; part < dim; part += 2 * LANES) {
        v16 sums[4][2] = {{{0}}};
        int wide = part + LANES < dim;
        for (int64_t b = first; b < last; b++) {
            const number *v = values + table[b] * stride + part;
            int64_t from = b == first ? begin - b * BLOCK : 0;
            int64_t to = least(BLOCK, end - b * BLOCK);
            for (int64_t t = from; t < to; t++) {
                v16 v0 = load16(v + t * dim);
                v16 v1 = wide ? load16(v + t * dim + LANES) : v0;
                for (int h = 0; h < heads; h++) {
                    float p = scores[h * context + b * BLOCK + t];
                    sums[h][0] += p * v0;
                    sums[h][1] += p * v1;
                }
            }
        }
        for (int h = 0; h < heads; h++) {
            store16(out + h * dim + part, sums[h][0] * inverse[h]);
            if (wide) store16(out + h * dim + part + LANES, sums[h][1] * inverse[h]);
        }
    }
}

static void attend_row(const Shape *s, const Step *step, int64_t row, int64_t kv_head,
                       const number *keys, const number *values, float *scores) {
    int64_t group = s->heads / s->kv_heads, dim = s->dim;
    int64_t end = step->positions[row] + 1;
    int64_t begin = s->window && end > s->window ? end - s->window : 0;
    int64_t stride = s->kv_heads * dim * BLOCK;
    const int32_t *table = step->table + step->row_run[row] * step->table_width;
    const float *q = step->qkv + row * (s->heads + 2 * s->kv_heads) * dim + kv_head * group * dim;
    number *out = step->input + row * s->heads * dim + kv_head * group * dim;
    keys += kv_head * dim * BLOCK;
    values += kv_head * dim * BLOCK;
    for (int64_t h = 0; h < group; h += 4) {
#define ATTEND(n)                                                                                  \
    attend(n, q + h * dim, dim, keys, values, stride, table, begin, end, scores, step->context,    \
           out + h * dim)
        switch (least(4, group - h)) {
        case 1: ATTEND(1); break;
        case 2: ATTEND(2); break;
        case 3: ATTEND(3); break;
        default: ATTEND(4);
        }
#undef ATTEND
    }
}

static void begin_row(const Shape *s, const Step *step, const number *embedding, int64_t row) {
    const number *from = embedding + step->ids[row] * s->hidden;
    float *x = step->x + row * s->hidden, *angles = step->angles + row * s->dim;
    for (int64_t i = 0; i < s->hidden; i += LANES) *(v16 *)(x + i) = load16(from + i) * s->embed_scale;
    for (int64_t i = 0; i < s->dim / 2; i++) {
        float angle = (float)step->positions[row] * step->frequencies[i];
        angles[i] = cosf(angle) * s->angle_scale;
        angles[s->dim / 2 + i] = sinf(angle) * s->angle_scale;
    }
}

#define CHUNKS(n) (((n) + CHUNK - 1) / CHUNK)

/* Called by every thread of the team; each loop ends with a barrier. */
static void layer_step(const Shape *s, const Step *step, const Layer *layer, number *keys,
                       number *values) {
    int64_t rows = step->rows, dim = s->dim, hidden = s->hidden;
    int64_t nq = s->heads * dim, nkv = s->kv_heads * dim, nqkv = nq + 2 * nkv;
    int64_t cq = CHUNKS(nq), ckv = CHUNKS(nkv);
#pragma omp for schedule(dynamic, 4)
    for (int64_t i = 0; i < rows; i++)
        norm_row(s, step->x + i * hidden, layer->input_norm, step->input + i * hidden);
#pragma omp for schedule(dynamic, 1)
    for (int64_t c = 0; c < cq + 2 * ckv; c++) {
        if (c < cq)
            product(step->input, rows, hidden, layer->q, nq, c * CHUNK, step->qkv, nqkv, 0);
        else if (c < cq + ckv)
            product(step->input, rows, hidden, layer->k, nkv, (c - cq) * CHUNK, step->qkv + nq,
                    nqkv, 0);
        else
            product(step->input, rows, hidden, layer->v, nkv, (c - cq - ckv) * CHUNK,
                    step->qkv + nq + nkv, nqkv, 0);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < rows; i++) place_row(s, step, layer, i, keys, values);
#pragma omp for schedule(dynamic, 2)
    for (int64_t i = 0; i < rows * s->kv_heads; i++)
        attend_row(s, step, i / s->kv_heads, i % s->kv_heads, keys, values,
                   step->scores + omp_get_thread_num() * 4 * step->context);
#pragma omp for schedule(dynamic, 1)
    for (int64_t c = 0; c < CHUNKS(hidden); c++)
        product(step->input, rows, nq, layer->o, hidden, c * CHUNK, step->x, hidden, 1);
#pragma omp for schedule(dynamic, 4)
    for (int64_t i = 0; i < rows; i++)
        norm_row(s, step->x + i * hidden, layer->mlp_norm, step->input + i * hidden);
#pragma omp for schedule(dynamic, 1)
    for (int64_t c = 0; c < CHUNKS(s->inner); c++)
        gated_product(s, step->input, rows, layer, c * CHUNK, step->inner);
#pragma omp for schedule(dynamic, 1)
    for (int64_t c = 0; c < CHUNKS(hidden); c++)
        product(step->inner, rows, s->inner, layer->down, hidden, c * CHUNK, step->x, hidden, 1);
}

void flat_step(const Shape *s, const Layer *layers, const number *embedding, const number *norm,
               const number *head, const Step *step) {
#pragma omp parallel num_threads((int)step->threads)
    {
#pragma omp for schedule(dynamic, 4)
        for (int64_t i = 0; i < step->rows; i++) begin_row(s, step, embedding, i);
        for (int64_t i = 0; i < s->layers; i++)
            layer_step(s, step, layers + i, step->keys + i * s->cache_layer,
                       step->values + i * s->cache_layer);
#pragma omp for schedule(dynamic, 4)
        for (int64_t i = 0; i < step->samples; i++)
            norm_row(s, step->x + step->sample_rows[i] * s->hidden, norm,
                     step->input + i * s->hidden);
        Linear last = {head, 0};
#pragma omp for schedule(dynamic, 8)
        for (int64_t c = 0; c < CHUNKS(s->vocab); c++)
            product(step->input, step->samples, s->hidden, last, s->vocab, c * CHUNK, step->logits,
                    s->vocab, 0);
    }
}

/* The place of each row's highest logit; the first of equals. */
void best_of_rows(const float *logits, int64_t rows, int64_t vocab, int64_t threads, int64_t *out) {
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)threads)
    for (int64_t i = 0; i < rows; i++) {
        const float *line = logits + i * vocab;
        float highest = line[0];
        int64_t whole = vocab / LANES * LANES, at = 0;
        v16 top = (v16){0} + line[0];
        for (int64_t j = 0; j < whole; j += LANES) {
            v16 some = *(const v16 *)(line + j);
            top = larger(some, top);
        }
        for (int j = 0; j < LANES; j++) highest = top[j] > highest ? top[j] : highest;
        for (int64_t j = whole; j < vocab; j++) highest = line[j] > highest ? line[j] : highest;
        while (at < vocab - 1 && line[at] != highest) at++;
        out[i] = at;
    }
}
