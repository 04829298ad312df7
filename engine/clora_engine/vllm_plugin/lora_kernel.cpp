// LoRA for any mix of adapters in one batch, on a CPU: y[row] += scale * x[row] @ A[slot] @ B[slot], each row with its
// own slot's A and B; rows of the base model are never touched. Compiled and called by lora_kernel.py.
//
// Two phases in one parallel region. shrink: h[row, r] = <x[row], A[slot, r]>. expand: y[row, o] += sum_r h[row, r] *
// B[slot, r, o]. In both, a tile of up to TILE rows shares each load of the weights, for a decode step is bound by
// reading them; what a thread reads next is asked for in advance. Padding is not read: a slot holds an adapter of any
// rank up to the largest, zeros behind its own.
//
// A row's sums are taken in one order, whatever else is in the batch and however many threads there are: its result
// does not depend on its neighbours, bit for bit.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __FMA__
#include <immintrin.h>
#endif

namespace {

// A vector is one register, and TILE * RANKS accumulators leave room for what is loaded: what does not fit goes through
// memory, at a tenth of the speed.
#if defined(__AVX512F__)
constexpr int WIDTH = 16;  // floats of a vector
constexpr int RANKS = 4;   // of a shrink task; 24 of 32 registers
#elif defined(__AVX__)
constexpr int WIDTH = 8;
constexpr int RANKS = 2;  // 12 of 16
#else
constexpr int WIDTH = 4;
constexpr int RANKS = 2;
#endif
constexpr int TILE = 6;      // rows of a tile
constexpr int COLUMNS = 64;  // outputs of an expand task
constexpr int CHUNK = 60;    // rows of a task: ten tiles, so that x stays in the cache
constexpr double PRODUCTS_PER_BYTE = 3;  // multiply-adds that take one thread as long as reading a byte of weights
constexpr int MAX_PROJECTIONS = 4;

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t bits __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t half_bits __attribute__((vector_size(2 * WIDTH)));

inline vec all(float value) { return value - vec{}; }

// a * b + c, rounded once where the CPU can. Left to the compiler, whether it is depends on what it is tuned for and on
// the loop around it, and so a row's sums on how many rows share its tile.
inline vec multiply_add(vec a, vec b, vec c) {
#if defined(__AVX512F__)
  return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

struct bfloat16 {
  uint16_t value;
};

inline vec load(const float* p) {
  vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }

inline vec load(const bfloat16* p) {
  half_bits h;
  std::memcpy(&h, p, sizeof h);
  return (vec)(__builtin_convertvector(h, bits) << 16);
}

inline void store(bfloat16* p, vec v) {
  bits b = (bits)v;
  bits rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;  // to nearest, ties to even
  rounded = (v == v) ? rounded : (bits{} + 0x7fc0u);      // rounding must not carry a NaN over
  half_bits h = __builtin_convertvector(rounded, half_bits);
  std::memcpy(p, &h, sizeof h);
}

template <class T>
inline vec load_part(const T* p, int n) {
  T padded[WIDTH] = {};
  std::memcpy(padded, p, n * sizeof(T));
  return load(padded);
}

template <class T>
inline void store_part(T* p, vec v, int n) {
  T padded[WIDTH];
  store(padded, v);
  std::memcpy(p, padded, n * sizeof(T));
}

inline float sum(vec v) {
  for (int half = WIDTH / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}

}  // namespace

extern "C" {

// The weights of one layer with all slots. `used` [slots, projections] caches the rank without padding; -1: not known.
struct Layer {
  int64_t is_bfloat16, projections, rank, inputs;
  int64_t outputs[MAX_PROJECTIONS];
  const void* a;                   // [slots, projections, rank, inputs]
  const void* b[MAX_PROJECTIONS];  // [slots, rank, outputs]
  int64_t* used;
};

// The rows that use each slot: rows[starts[i]:starts[i + 1]] belong to slots[i].
struct Batch {
  int64_t count;
  const int64_t* slots;
  const int64_t* starts;
  const int64_t* rows;
};

}  // extern "C"

namespace {

struct Chunk {
  int64_t slot, start, end;  // positions in Batch::rows
};

template <class T>
struct Call {
  const Layer& layer;
  const Batch& batch;
  const T* x;
  int64_t x_stride;
  T* y;
  int64_t y_stride;
  float scale;
  float* hidden;  // [rows, projections, rank] in the order of Batch::rows
  int64_t ahead;  // ranks from one shrink task of a thread to its next

  float* hidden_of(int64_t position, int64_t projection) const {
    return hidden + (position * layer.projections + projection) * layer.rank;
  }

  int64_t used(int64_t slot, int64_t projection) const { return layer.used[slot * layer.projections + projection]; }

  template <int M, int N>
  void shrink_tile(const T* a, int64_t position, int64_t projection, int64_t first) const {
    const T* row[M];
    for (int m = 0; m < M; ++m) row[m] = x + batch.rows[position + m] * x_stride;
    vec total[M][N] = {};
    const int64_t inputs = layer.inputs, whole = inputs - inputs % WIDTH;
    for (int64_t i = 0; i < whole; i += WIDTH) {
      vec weight[N];
      for (int n = 0; n < N; ++n) {
        weight[n] = load(a + n * inputs + i);
        __builtin_prefetch(a + (n + ahead) * inputs + i);
      }
      for (int m = 0; m < M; ++m) {
        const vec value = load(row[m] + i);
        for (int n = 0; n < N; ++n) total[m][n] = multiply_add(value, weight[n], total[m][n]);
      }
    }
    if (const int rest = inputs - whole)
      for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n)
          total[m][n] = multiply_add(load_part(row[m] + whole, rest), load_part(a + n * inputs + whole, rest),
                                     total[m][n]);
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) hidden_of(position + m, projection)[first + n] = scale * sum(total[m][n]);
  }

  template <int M, int C>
  void expand_tile(const T* b, int64_t stride, int64_t ranks, int64_t position, int64_t projection, T* out,
                   int width) const {
    const float* h[M];
    for (int m = 0; m < M; ++m) h[m] = hidden_of(position + m, projection);
    vec total[M][C] = {};
    for (int64_t r = 0; r < ranks; ++r) {
      vec weight[C];
      __builtin_prefetch(b + r * stride + COLUMNS);
      for (int c = 0; c < C; ++c)
        weight[c] = width == C * WIDTH ? load(b + r * stride + c * WIDTH) : load_part(b + r * stride, width);
      for (int m = 0; m < M; ++m)
        for (int c = 0; c < C; ++c) total[m][c] = multiply_add(all(h[m][r]), weight[c], total[m][c]);
    }
    for (int m = 0; m < M; ++m) {
      T* target = out + batch.rows[position + m] * y_stride;
      for (int c = 0; c < C; ++c)
        if (width == C * WIDTH)
          store(target + c * WIDTH, load(target + c * WIDTH) + total[m][c]);
        else
          store_part(target, load_part(target, width) + total[m][c], width);
    }
  }

  // Calls f with M = TILE as long as that many rows are left, then once with what is left.
  template <class F>
  static void tiles(int64_t start, int64_t end, F f) {
    for (; end - start >= TILE; start += TILE) f(std::integral_constant<int, TILE>{}, start);
    switch (end - start) {
      case 5: f(std::integral_constant<int, 5>{}, start); break;
      case 4: f(std::integral_constant<int, 4>{}, start); break;
      case 3: f(std::integral_constant<int, 3>{}, start); break;
      case 2: f(std::integral_constant<int, 2>{}, start); break;
      case 1: f(std::integral_constant<int, 1>{}, start); break;
    }
  }

  // h of one chunk for ranks [first, first + RANKS) of one projection.
  void shrink(const Chunk& chunk, int64_t projection, int64_t first) const {
    const int64_t ranks = used(chunk.slot, projection);
    if (first >= ranks) return;
    const int64_t at = (chunk.slot * layer.projections + projection) * layer.rank + first;
    const T* a = static_cast<const T*>(layer.a) + at * layer.inputs;
    tiles(chunk.start, chunk.end, [&](auto m, int64_t position) {
      constexpr int M = decltype(m)::value;
      if (ranks - first >= RANKS) return shrink_tile<M, RANKS>(a, position, projection, first);
      for (int64_t n = 0; n < ranks - first; ++n)
        shrink_tile<M, 1>(a + n * layer.inputs, position, projection, first + n);
    });
  }

  // y of one chunk for outputs [first, first + COLUMNS) of one projection, which start at column `offset` of y.
  void expand(const Chunk& chunk, int64_t projection, int64_t first, int64_t offset) const {
    const int64_t ranks = used(chunk.slot, projection), outputs = layer.outputs[projection];
    if (ranks == 0) return;
    const T* b = static_cast<const T*>(layer.b[projection]) + chunk.slot * layer.rank * outputs;
    const int64_t last = std::min(first + COLUMNS, outputs);
    int64_t o = first;
    const auto step = [&](auto columns, int width) {
      tiles(chunk.start, chunk.end, [&](auto m, int64_t position) {
        expand_tile<decltype(m)::value, decltype(columns)::value>(b + o, outputs, ranks, position, projection,
                                                                  y + offset + o, width);
      });
      o += width;
    };
    while (last - o >= 2 * WIDTH) step(std::integral_constant<int, 2>{}, 2 * WIDTH);
    while (last > o) step(std::integral_constant<int, 1>{}, std::min<int64_t>(WIDTH, last - o));
  }
};

// The rank behind which A holds nothing but zeros.
template <class T>
int64_t used_rank(const Layer& layer, int64_t slot, int64_t projection) {
  const T* a = static_cast<const T*>(layer.a) + (slot * layer.projections + projection) * layer.rank * layer.inputs;
  int64_t values = layer.rank * layer.inputs;
  while (values > 0 && std::memcmp(&a[values - 1], "\0\0\0", sizeof(T)) == 0) --values;
  return (values + layer.inputs - 1) / layer.inputs;
}

template <class T>
void add(const Layer& layer, const Batch& batch, const void* x, int64_t x_stride, void* y, int64_t y_stride,
         float scale, int threads, int64_t fork_from) {
  static thread_local std::vector<Chunk> chunks;
  static thread_local std::vector<float> hidden;
  chunks.clear();
  double bytes = 0, products = 0;
  for (int64_t i = 0; i < batch.count; ++i) {
    const int64_t slot = batch.slots[i];
    for (int64_t j = 0; j < layer.projections; ++j) {
      int64_t& used = layer.used[slot * layer.projections + j];
      if (used < 0) used = used_rank<T>(layer, slot, j);
      const double weights = double(used) * (layer.inputs + layer.outputs[j]);
      bytes += weights * sizeof(T);
      products += weights * (batch.starts[i + 1] - batch.starts[i]);
    }
    for (int64_t start = batch.starts[i]; start < batch.starts[i + 1]; start += CHUNK)
      chunks.push_back({slot, start, std::min<int64_t>(start + CHUNK, batch.starts[i + 1])});
  }
  const int64_t rows = batch.starts[batch.count];
  hidden.resize(rows * layer.projections * layer.rank);
  const bool forks = threads > 1 && std::max(bytes, products / PRODUCTS_PER_BYTE) >= fork_from;
  const Call<T> call{layer,    batch, static_cast<const T*>(x), x_stride,      static_cast<T*>(y),
                     y_stride, scale, hidden.data(),            RANKS * (forks ? threads : 1)};
  const Chunk* chunk = chunks.data();  // thread_local names mean another vector in another thread

  int64_t expands = 0;
  for (int64_t j = 0; j < layer.projections; ++j) expands += (layer.outputs[j] + COLUMNS - 1) / COLUMNS;
  const int64_t count = chunks.size(), per_projection = (layer.rank + RANKS - 1) / RANKS;
  const int64_t shrinks = layer.projections * per_projection;
#pragma omp parallel num_threads(threads) if (forks)
  {
#pragma omp for schedule(static, 1)  // neighbours in turn: those behind an adapter's own rank have nothing to do
    for (int64_t task = 0; task < count * shrinks; ++task) {
      const int64_t block = task % shrinks;
      call.shrink(chunk[task / shrinks], block / per_projection, block % per_projection * RANKS);
    }
#pragma omp for schedule(static) nowait
    for (int64_t task = 0; task < count * expands; ++task) {
      int64_t block = task % expands, offset = 0, j = 0;
      for (; block * COLUMNS >= layer.outputs[j]; ++j) {
        block -= (layer.outputs[j] + COLUMNS - 1) / COLUMNS;
        offset += layer.outputs[j];
      }
      call.expand(chunk[task / expands], j, block * COLUMNS, offset);
    }
  }
}

}  // namespace

extern "C" void clora_add_lora(const Layer* layer, const Batch* batch, const void* x, int64_t x_stride, void* y,
                               int64_t y_stride, float scale, int threads, int64_t fork_from) {
  const auto run = layer->is_bfloat16 ? add<bfloat16> : add<float>;
  run(*layer, *batch, x, x_stride, y, y_stride, scale, threads, fork_from);
}
