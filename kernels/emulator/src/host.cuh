// The prelude on the CPU: every name is a call into the emulator's model of the hardware, which hands
// over a table of functions when it loads the library. Included by `prelude.cuh` only.
//
// Kernels are compiled with -fsanitize=thread,alignment, so that the compiler calls the hooks at the end
// of this file at every load and store; the hooks, too, ask the emulator. What is marked HOST_ is not
// instrumented. A thread of the block is a fiber: what it is (its index, its block) is the same for the
// whole life of a function's frame, hence `const` functions, which the compiler calls once.

#define HOST_ static __attribute__((noinline, unused, no_sanitize("thread")))
#define HOST_CONST_ static __attribute__((noinline, unused, const, no_sanitize("thread")))
#define SITE_ __builtin_return_address(0)

#define DEV static inline __attribute__((unused))
#define KERNEL(threads, min_blocks) static void
#define GRID_CONST const
#define DYN_SMEM(name) u8* const name = (u8*)shared_memory_()
#define UNROLL

struct Index_ {
  u32 x, y, z;
};

// The emulator's side, in the order of `abi.rs`. `site` is where in the kernel the call is.
struct Model_ {
  void (*read)(const void* p, u64 bytes, u64 alignment, const void* site);
  void (*write)(const void* p, u64 bytes, u64 alignment, const void* site);
  void (*misaligned)(const void* p, u64 alignment, const void* site);
  void (*index)(u32 which, Index_* out);
  void* (*shared)();
  void (*sync_threads)(const void* site);
  void (*sync_warp)(const void* site);
  void (*named_barrier)(u32 id, u32 threads, u32 wait, const void* site);
  u32 (*exchange)(u32 kind, u32 value, u32 operand, const void* site);
  u32 (*atomic)(u32 kind, void* p, u32 value, u32 expected, const void* site);
  void (*fence)(u32 kind, const void* site);
  u32 (*load_acquire)(const void* p, const void* site);
  void (*store_release)(void* p, u32 value, const void* site);
  void (*cp_async)(void* dst, const void* src, u32 valid_bytes, const void* site);
  void (*commit)(u32 engine, const void* site);
  void (*wait)(u32 engine, u32 groups, const void* site);
  void (*ldmatrix)(u32* r, const void* row, u32 matrices, u32 transposed, const void* site);
  void (*stmatrix)(void* row, const u32* r, u32 matrices, u32 transposed, const void* site);
  void (*mma)(float* d, const u32* a, const u32* b, const void* site);
  void (*mbar_init)(u64* bar, u32 arrivals, const void* site);
  void (*mbar_arrive)(u64* bar, u32 bytes, const void* site);
  u32 (*mbar_wait)(u64* bar, u32 parity, u32 until_done, const void* site);
  void (*tma)(u32 kind, u32 rank, const void* shared, const void* map, u64* bar, const i32* at, const void* site);
  void (*wgmma)(u32 shape, float* d, u64 a, const u32* a_registers, u64 b, u32 accumulate, const void* site);
  void (*registers)(u32 count, u32 increase, const void* site);
};
static const Model_* model_table_;
extern "C" __attribute__((no_sanitize("thread"))) void moefold_attach(const Model_* model) { model_table_ = model; }
HOST_CONST_ const Model_& model_() { return *model_table_; }

HOST_CONST_ Index_ index_(u32 which) {
  Index_ out;
  model_().index(which, &out);
  return out;
}
HOST_CONST_ void* shared_memory_() { return model_().shared(); }
#define threadIdx (index_(0))
#define blockIdx (index_(1))
#define blockDim (index_(2))
#define gridDim (index_(3))

// The address that descriptors and bulk copies use: bytes from the start of the block's shared memory.
HOST_ u32 smem_addr(const void* p) { return (u32)((const u8*)p - (const u8*)shared_memory_()); }

// ---- Entry points ----
// `moefold_run_NAME(arguments)` calls the kernel with pointers to its arguments;
// `moefold_sizes_NAME(sizes)` gives their number and, where asked, their sizes in bytes.

template <class... A>
struct Types_ {};
template <class... A, class... Got>
HOST_ void call_(void (*kernel)(A...), void**, Types_<>, Got&... got) {
  kernel(got...);
}
template <class... A, class Next, class... Rest, class... Got>
HOST_ void call_(void (*kernel)(A...), void** arguments, Types_<Next, Rest...>, Got&... got) {
  call_(kernel, arguments + 1, Types_<Rest...>(), got..., *(Next*)arguments[0]);
}
template <class... A>
HOST_ void run_(void (*kernel)(A...), void** arguments) {
  call_(kernel, arguments, Types_<A...>());
}
template <class... A>
HOST_ u32 sizes_(void (*)(A...), u32* sizes) {
  const u32 all[] = {(u32)sizeof(A)..., 0};
  for (u32 i = 0; sizes && i < sizeof...(A); i++) sizes[i] = all[i];
  return sizeof...(A);
}
#define EXPORT(name)                                                                                         \
  extern "C" __attribute__((no_sanitize("thread"))) void moefold_run_##name(void** arguments) {              \
    run_(name, arguments);                                                                                   \
  }                                                                                                          \
  extern "C" __attribute__((no_sanitize("thread"))) u32 moefold_sizes_##name(u32* sizes) {                   \
    return sizes_(name, sizes);                                                                              \
  }

// ---- Numbers ----

DEV float f32_of_bits(u32 bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
DEV u32 bits_of_f32(float x) {
  u32 bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
// To nearest, ties to even; every NaN becomes the one that cvt.rn.bf16 gives.
DEV bf16 to_bf16(float x) {
  u32 bits = bits_of_f32(x);
  bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return bf16{(u16)(nan ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
}
DEV u32 pack_bf16(float lower, float upper) {
  return (u32)to_bf16(lower).bits | (u32)to_bf16(upper).bits << 16;
}
DEV float exp2_(float x) { return __builtin_exp2f(x); }
DEV float exp2_flush(float x) {
  float y = __builtin_exp2f(x);
  return y < 0x1p-126f ? 0.f : y;
}
DEV float exp_(float x) { return __builtin_expf(x); }
DEV float log2_(float x) { return __builtin_log2f(x); }
DEV float log_(float x) { return __builtin_logf(x); }
DEV float sin_(float x) { return __builtin_sinf(x); }
DEV float cos_(float x) { return __builtin_cosf(x); }
DEV float sqrt_(float x) { return __builtin_sqrtf(x); }
DEV float rsqrt_(float x) { return 1.f / __builtin_sqrtf(x); }
DEV float rcp_(float x) { return 1.f / x; }
DEV float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEV float abs_(float x) { return __builtin_fabsf(x); }
// The number where one is NaN, as fminf and fmaxf.
DEV float min_(float a, float b) { return a < b || b != b ? a : b; }
DEV float max_(float a, float b) { return a > b || b != b ? a : b; }

// ---- Global memory ----

DEV Vec4 load_stream(const void* p) { return *(const Vec4*)p; }
DEV void store_stream(void* p, Vec4 v) { *(Vec4*)p = v; }

enum Atomic_ : u32 { ATOMIC_ADD_, ATOMIC_ADD_F32_, ATOMIC_MAX_I32_, ATOMIC_MAX_U32_, ATOMIC_EXCH_, ATOMIC_CAS_ };
HOST_ i32 atomic_add(i32* p, i32 v) { return (i32)model_().atomic(ATOMIC_ADD_, p, (u32)v, 0, SITE_); }
HOST_ u32 atomic_add(u32* p, u32 v) { return model_().atomic(ATOMIC_ADD_, p, v, 0, SITE_); }
HOST_ float atomic_add(float* p, float v) {
  return f32_of_bits(model_().atomic(ATOMIC_ADD_F32_, p, bits_of_f32(v), 0, SITE_));
}
HOST_ i32 atomic_max(i32* p, i32 v) { return (i32)model_().atomic(ATOMIC_MAX_I32_, p, (u32)v, 0, SITE_); }
HOST_ u32 atomic_max(u32* p, u32 v) { return model_().atomic(ATOMIC_MAX_U32_, p, v, 0, SITE_); }
HOST_ i32 atomic_exch(i32* p, i32 v) { return (i32)model_().atomic(ATOMIC_EXCH_, p, (u32)v, 0, SITE_); }
HOST_ u32 atomic_exch(u32* p, u32 v) { return model_().atomic(ATOMIC_EXCH_, p, v, 0, SITE_); }
HOST_ i32 atomic_cas(i32* p, i32 expected, i32 v) {
  return (i32)model_().atomic(ATOMIC_CAS_, p, (u32)v, (u32)expected, SITE_);
}
HOST_ u32 atomic_cas(u32* p, u32 expected, u32 v) { return model_().atomic(ATOMIC_CAS_, p, v, expected, SITE_); }

enum Fence_ : u32 { FENCE_DEVICE_, FENCE_MBARRIER_INIT_, FENCE_ASYNC_, FENCE_ASYNC_GLOBAL_, FENCE_WGMMA_ };
HOST_ void thread_fence() { model_().fence(FENCE_DEVICE_, SITE_); }
HOST_ u32 load_acquire(const u32* p) { return model_().load_acquire(p, SITE_); }
HOST_ void store_release(u32* p, u32 v) { model_().store_release(p, v, SITE_); }

// ---- Threads of a block ----

HOST_ void __syncthreads() { model_().sync_threads(SITE_); }
HOST_ void syncwarp() { model_().sync_warp(SITE_); }
HOST_ void named_sync(u32 id, u32 threads) { model_().named_barrier(id, threads, 1, SITE_); }
HOST_ void named_arrive(u32 id, u32 threads) { model_().named_barrier(id, threads, 0, SITE_); }

enum Exchange_ : u32 { SHFL_XOR_, SHFL_, SHFL_UP_, SHFL_DOWN_, BALLOT_ };
template <class V>
HOST_ V exchange_(u32 kind, V v, u32 operand, const void* site) {
  static_assert(sizeof(V) == 4, "lanes exchange words of four bytes");
  u32 bits;
  __builtin_memcpy(&bits, &v, 4);
  bits = model_().exchange(kind, bits, operand, site);
  __builtin_memcpy(&v, &bits, 4);
  return v;
}
template <class V>
HOST_ V shfl_xor(V v, u32 mask) {
  return exchange_(SHFL_XOR_, v, mask, SITE_);
}
template <class V>
HOST_ V shfl(V v, u32 lane) {
  return exchange_(SHFL_, v, lane, SITE_);
}
template <class V>
HOST_ V shfl_up(V v, u32 distance) {
  return exchange_(SHFL_UP_, v, distance, SITE_);
}
template <class V>
HOST_ V shfl_down(V v, u32 distance) {
  return exchange_(SHFL_DOWN_, v, distance, SITE_);
}
HOST_ u32 ballot(bool predicate) { return exchange_(BALLOT_, (u32)predicate, 0, SITE_); }

// ---- Copies and tensor cores of sm_80 ----

enum Engine_ : u32 { CP_ASYNC_, BULK_, BULK_READ_, WGMMA_ };
HOST_ void cp_async16(void* dst, const void* src, u32 valid_bytes) {
  model_().cp_async(dst, src, valid_bytes, SITE_);
}
HOST_ void cp_async_commit() { model_().commit(CP_ASYNC_, SITE_); }
template <int N>
HOST_ void cp_async_wait() {
  model_().wait(CP_ASYNC_, N, SITE_);
}
HOST_ void ldmatrix_x4(u32 (&r)[4], const void* row) { model_().ldmatrix(r, row, 4, 0, SITE_); }
HOST_ void ldmatrix_x4_trans(u32 (&r)[4], const void* row) { model_().ldmatrix(r, row, 4, 1, SITE_); }
HOST_ void ldmatrix_x2(u32 (&r)[2], const void* row) { model_().ldmatrix(r, row, 2, 0, SITE_); }
HOST_ void ldmatrix_x2_trans(u32 (&r)[2], const void* row) { model_().ldmatrix(r, row, 2, 1, SITE_); }
HOST_ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { model_().mma(d, a, b, SITE_); }

#if ARCH >= 90
HOST_ void stmatrix_x4(void* row, const u32 (&r)[4]) { model_().stmatrix(row, r, 4, 0, SITE_); }
HOST_ void stmatrix_x4_trans(void* row, const u32 (&r)[4]) { model_().stmatrix(row, r, 4, 1, SITE_); }

// ---- Barriers in shared memory ----

HOST_ void mbar_init(u64* bar, u32 arrivals) { model_().mbar_init(bar, arrivals, SITE_); }
HOST_ void mbar_fence_init() { model_().fence(FENCE_MBARRIER_INIT_, SITE_); }
HOST_ void mbar_expect(u64* bar, u32 bytes) { model_().mbar_arrive(bar, bytes, SITE_); }
HOST_ void mbar_arrive(u64* bar) { model_().mbar_arrive(bar, 0, SITE_); }
HOST_ bool mbar_try(u64* bar, u32 parity) { return model_().mbar_wait(bar, parity, 0, SITE_) != 0; }
HOST_ void mbar_wait(u64* bar, u32 parity) { model_().mbar_wait(bar, parity, 1, SITE_); }

// ---- Bulk tensor copies ----

enum Tma_ : u32 { TMA_LOAD_, TMA_STORE_, TMA_REDUCE_ADD_ };
HOST_ void tma_prefetch(const TensorMap*) {}
HOST_ void tma_load_2d(void* dst, const TensorMap* map, u64* bar, i32 x, i32 y) {
  const i32 at[] = {x, y};
  model_().tma(TMA_LOAD_, 2, dst, map, bar, at, SITE_);
}
HOST_ void tma_load_3d(void* dst, const TensorMap* map, u64* bar, i32 x, i32 y, i32 z) {
  const i32 at[] = {x, y, z};
  model_().tma(TMA_LOAD_, 3, dst, map, bar, at, SITE_);
}
HOST_ void tma_load_4d(void* dst, const TensorMap* map, u64* bar, i32 x, i32 y, i32 z, i32 w) {
  const i32 at[] = {x, y, z, w};
  model_().tma(TMA_LOAD_, 4, dst, map, bar, at, SITE_);
}
HOST_ void tma_load_5d(void* dst, const TensorMap* map, u64* bar, i32 x, i32 y, i32 z, i32 w, i32 v) {
  const i32 at[] = {x, y, z, w, v};
  model_().tma(TMA_LOAD_, 5, dst, map, bar, at, SITE_);
}
HOST_ void tma_store_2d(const TensorMap* map, const void* src, i32 x, i32 y) {
  const i32 at[] = {x, y};
  model_().tma(TMA_STORE_, 2, src, map, nullptr, at, SITE_);
}
HOST_ void tma_store_3d(const TensorMap* map, const void* src, i32 x, i32 y, i32 z) {
  const i32 at[] = {x, y, z};
  model_().tma(TMA_STORE_, 3, src, map, nullptr, at, SITE_);
}
HOST_ void tma_store_4d(const TensorMap* map, const void* src, i32 x, i32 y, i32 z, i32 w) {
  const i32 at[] = {x, y, z, w};
  model_().tma(TMA_STORE_, 4, src, map, nullptr, at, SITE_);
}
HOST_ void tma_reduce_add_2d(const TensorMap* map, const void* src, i32 x, i32 y) {
  const i32 at[] = {x, y};
  model_().tma(TMA_REDUCE_ADD_, 2, src, map, nullptr, at, SITE_);
}
HOST_ void tma_reduce_add_3d(const TensorMap* map, const void* src, i32 x, i32 y, i32 z) {
  const i32 at[] = {x, y, z};
  model_().tma(TMA_REDUCE_ADD_, 3, src, map, nullptr, at, SITE_);
}
HOST_ void bulk_commit() { model_().commit(BULK_, SITE_); }
template <int N>
HOST_ void bulk_wait() {
  model_().wait(BULK_, N, SITE_);
}
template <int N>
HOST_ void bulk_wait_read() {
  model_().wait(BULK_READ_, N, SITE_);
}
HOST_ void fence_async() { model_().fence(FENCE_ASYNC_, SITE_); }
HOST_ void fence_async_global() { model_().fence(FENCE_ASYNC_GLOBAL_, SITE_); }

template <int N>
HOST_ void reg_dec() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg takes a multiple of 8 from 24 to 256");
  model_().registers(N, 0, SITE_);
}
template <int N>
HOST_ void reg_inc() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg takes a multiple of 8 from 24 to 256");
  model_().registers(N, 1, SITE_);
}
#endif

#if ARCH == 90
// ---- Tensor cores of sm_90a ----

HOST_ void wgmma_fence() { model_().fence(FENCE_WGMMA_, SITE_); }
HOST_ void wgmma_commit() { model_().commit(WGMMA_, SITE_); }
template <int N>
HOST_ void wgmma_wait() {
  model_().wait(WGMMA_, N, SITE_);
}
// Here all happens in the order of the source; what is left to see is that no product is under way.
template <int N>
HOST_ void settle(float (&d)[N]) {
  model_().read(d, sizeof(d), alignof(float), SITE_);
}
// The shape is N, with the transpositions of a and b in the bits above.
template <int N, int TransA, int TransB>
HOST_ void wgmma(float (&d)[N / 2], u64 a, u64 b, bool accumulate) {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256, "N is a multiple of 8 from 8 to 256");
  model_().wgmma(N | TransA << 16 | TransB << 17, d, a, nullptr, b, accumulate, SITE_);
}
template <int N, int TransB>
HOST_ void wgmma_rs(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool accumulate) {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256, "N is a multiple of 8 from 8 to 256");
  model_().wgmma(N | TransB << 17, d, 0, a, b, accumulate, SITE_);
}
#endif

// ---- What the instrumentation calls ----

#define HOOK_ extern "C" __attribute__((no_sanitize("thread"), visibility("hidden"))) void
#define HOOKS_(bytes)                                                                                        \
  HOOK_ __tsan_read##bytes(void* p) { model_().read(p, bytes, bytes, SITE_); }                               \
  HOOK_ __tsan_write##bytes(void* p) { model_().write(p, bytes, bytes, SITE_); }                             \
  HOOK_ __tsan_volatile_read##bytes(void* p) { model_().read(p, bytes, bytes, SITE_); }                      \
  HOOK_ __tsan_volatile_write##bytes(void* p) { model_().write(p, bytes, bytes, SITE_); }
HOOKS_(1)
HOOKS_(2)
HOOKS_(4)
HOOKS_(8)
HOOKS_(16)
#define UNALIGNED_HOOKS_(bytes)                                                                              \
  HOOK_ __tsan_unaligned_read##bytes(void* p) { model_().read(p, bytes, 1, SITE_); }                         \
  HOOK_ __tsan_unaligned_write##bytes(void* p) { model_().write(p, bytes, 1, SITE_); }
UNALIGNED_HOOKS_(2)
UNALIGNED_HOOKS_(4)
UNALIGNED_HOOKS_(8)
UNALIGNED_HOOKS_(16)
HOOK_ __tsan_read_range(void* p, u64 bytes) { model_().read(p, bytes, 1, SITE_); }
HOOK_ __tsan_write_range(void* p, u64 bytes) { model_().write(p, bytes, 1, SITE_); }
// A pointer is followed that is no multiple of its type's alignment, whatever the access becomes.
struct Mismatch_ {
  const void* place[2];
  const void* type;
  u8 log_alignment;
};
HOOK_ __ubsan_handle_type_mismatch_v1(const Mismatch_* mismatch, void* p) {
  model_().misaligned(p, 1ull << mismatch->log_alignment, SITE_);
}
HOOK_ __tsan_func_entry(void*) {}
HOOK_ __tsan_func_exit() {}
HOOK_ __tsan_init() {}

// Loops that the compiler turns into these are seen as well; byte by byte through volatile, so that
// they are not turned into themselves.
#define LIBC_ extern "C" __attribute__((no_sanitize("thread"))) void*
LIBC_ memset(void* p, int value, unsigned long bytes) {
  model_().write(p, bytes, 1, SITE_);
  for (u64 i = 0; i < bytes; i++) ((volatile u8*)p)[i] = (u8)value;
  return p;
}
LIBC_ memmove(void* to, const void* from, unsigned long bytes) {
  model_().read(from, bytes, 1, SITE_);
  model_().write(to, bytes, 1, SITE_);
  for (u64 i = 0; i < bytes; i++) {
    u64 at = (u8*)to < (const u8*)from ? i : bytes - 1 - i;
    ((volatile u8*)to)[at] = ((const u8*)from)[at];
  }
  return to;
}
LIBC_ memcpy(void* to, const void* from, unsigned long bytes) { return memmove(to, from, bytes); }
LIBC_ __tsan_memset(void* p, int value, unsigned long bytes) { return memset(p, value, bytes); }
LIBC_ __tsan_memmove(void* to, const void* from, unsigned long bytes) { return memmove(to, from, bytes); }
LIBC_ __tsan_memcpy(void* to, const void* from, unsigned long bytes) { return memmove(to, from, bytes); }
