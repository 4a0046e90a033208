// The prelude on a GPU: every name is one instruction, or close to it. Included by `prelude.cuh` only.

#define DEV __device__ __forceinline__
#define KERNEL(threads, min_blocks) extern "C" __global__ void __launch_bounds__(threads, min_blocks)
#define EXPORT(name)
#define GRID_CONST const __grid_constant__
#define DYN_SMEM(name) extern __shared__ __align__(1024) u8 name[]
#define UNROLL _Pragma("unroll")

DEV u32 smem_addr(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- Numbers ----

DEV float f32_of_bits(u32 bits) { return __uint_as_float(bits); }
DEV u32 bits_of_f32(float x) { return __float_as_uint(x); }
DEV bf16 to_bf16(float x) {
  bf16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
  return r;
}
DEV u32 pack_bf16(float lower, float upper) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(upper), "f"(lower));
  return r;
}
DEV float exp2_(float x) {
  float r;
  asm("ex2.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
// Without the detour that gives results below 2^-126: they are zero.
DEV float exp2_flush(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
DEV float exp_(float x) { return expf(x); }
DEV float log2_(float x) { return log2f(x); }
DEV float log_(float x) { return logf(x); }
DEV float sin_(float x) { return sinf(x); }
DEV float cos_(float x) { return cosf(x); }
DEV float sqrt_(float x) { return sqrtf(x); }
DEV float rsqrt_(float x) { return rsqrtf(x); }
DEV float rcp_(float x) { return __frcp_rn(x); }
DEV float fma_(float a, float b, float c) { return fmaf(a, b, c); }
DEV float abs_(float x) { return fabsf(x); }
DEV float min_(float a, float b) { return fminf(a, b); }
DEV float max_(float a, float b) { return fmaxf(a, b); }

// ---- Global memory ----

// Read or written once: leaves no line behind in L1.
DEV Vec4 load_stream(const void* p) {
  Vec4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEV void store_stream(void* p, Vec4 v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// All atomics are relaxed, of device scope, and return the value before.
DEV i32 atomic_add(i32* p, i32 v) { return atomicAdd(p, v); }
DEV u32 atomic_add(u32* p, u32 v) { return atomicAdd(p, v); }
DEV float atomic_add(float* p, float v) { return atomicAdd(p, v); }
DEV i32 atomic_max(i32* p, i32 v) { return atomicMax(p, v); }
DEV u32 atomic_max(u32* p, u32 v) { return atomicMax(p, v); }
DEV i32 atomic_exch(i32* p, i32 v) { return atomicExch(p, v); }
DEV u32 atomic_exch(u32* p, u32 v) { return atomicExch(p, v); }
DEV i32 atomic_cas(i32* p, i32 expected, i32 v) { return atomicCAS(p, expected, v); }
DEV u32 atomic_cas(u32* p, u32 expected, u32 v) { return atomicCAS(p, expected, v); }
DEV void thread_fence() { __threadfence(); }
DEV u32 load_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEV void store_release(u32* p, u32 v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// ---- Threads of a block ----

DEV void syncwarp() { __syncwarp(); }
// Barrier `id` (1 to 15) among `threads` threads, a multiple of 32.
DEV void named_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEV void named_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Shuffles of a whole warp; beyond its ends a lane gets its own value back.
template <class V>
DEV V shfl_xor(V v, u32 mask) {
  return __shfl_xor_sync(0xffffffffu, v, mask);
}
template <class V>
DEV V shfl(V v, u32 lane) {
  return __shfl_sync(0xffffffffu, v, lane);
}
template <class V>
DEV V shfl_up(V v, u32 distance) {
  return __shfl_up_sync(0xffffffffu, v, distance);
}
template <class V>
DEV V shfl_down(V v, u32 distance) {
  return __shfl_down_sync(0xffffffffu, v, distance);
}
DEV u32 ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }

// ---- Copies and tensor cores of sm_80 ----

// 16 bytes from global to shared memory; those from `valid_bytes` on become zero.
DEV void cp_async16(void* dst, const void* src, u32 valid_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_addr(dst)), "l"(src),
               "r"(valid_bytes)
               : "memory");
}
DEV void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most the last `N` groups of this thread are in flight.
template <int N>
DEV void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Matrices of 8x8 bf16: lanes 0-7 give the rows of the first, 8-15 of the second, and so on.
DEV void ldmatrix_x4(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_addr(row))
               : "memory");
}
DEV void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_addr(row))
               : "memory");
}
DEV void ldmatrix_x2(u32 (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(smem_addr(row))
               : "memory");
}
DEV void ldmatrix_x2_trans(u32 (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(smem_addr(row))
               : "memory");
}
// d += a b: a [16, 16], b [16, 8], d [16, 8].
DEV void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#if ARCH >= 90
DEV void stmatrix_x4(void* row, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_addr(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
DEV void stmatrix_x4_trans(void* row, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   smem_addr(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// ---- Barriers in shared memory ----

DEV void mbar_init(u64* bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(bar)), "r"(arrivals) : "memory");
}
// After the inits, before the barrier of the block that publishes them.
DEV void mbar_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Arrives, and adds to the bytes that the phase waits for.
DEV void mbar_expect(u64* bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(bar)), "r"(bytes)
               : "memory");
}
DEV void mbar_arrive(u64* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_addr(bar)) : "memory");
}
// Whether the phase of this parity is over.
DEV bool mbar_try(u64* bar, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(smem_addr(bar)), "r"(parity)
      : "memory");
  return done != 0;
}
DEV void mbar_wait(u64* bar, u32 parity) {
  while (!mbar_try(bar, parity)) {
  }
}

// ---- Bulk tensor copies ----
// Coordinates are elements, innermost first. A load counts the bytes of its whole box on the barrier,
// edges included; what lies outside the tensor arrives as zero and is not stored.

DEV void tma_prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
DEV void tma_load_2d(void* dst, const TensorMap* map, u64* bar, i32 x, i32 y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
      "[%2];" ::"r"(smem_addr(dst)),
      "l"(map), "r"(smem_addr(bar)), "r"(x), "r"(y)
      : "memory");
}
DEV void tma_load_3d(void* dst, const TensorMap* map, u64* bar, i32 x, i32 y, i32 z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%5}], [%2];" ::"r"(smem_addr(dst)),
      "l"(map), "r"(smem_addr(bar)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
DEV void tma_load_4d(void* dst, const TensorMap* map, u64* bar, i32 x, i32 y, i32 z, i32 w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%5, %6}], [%2];" ::"r"(smem_addr(dst)),
      "l"(map), "r"(smem_addr(bar)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
DEV void tma_load_5d(void* dst, const TensorMap* map, u64* bar, i32 x, i32 y, i32 z, i32 w, i32 v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%5, %6, %7}], [%2];" ::"r"(smem_addr(dst)),
      "l"(map), "r"(smem_addr(bar)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
      : "memory");
}
DEV void tma_store_2d(const TensorMap* map, const void* src, i32 x, i32 y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(smem_addr(src)), "r"(x), "r"(y)
               : "memory");
}
DEV void tma_store_3d(const TensorMap* map, const void* src, i32 x, i32 y, i32 z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(smem_addr(src)), "r"(x), "r"(y), "r"(z)
               : "memory");
}
DEV void tma_store_4d(const TensorMap* map, const void* src, i32 x, i32 y, i32 z, i32 w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
                   map),
               "r"(smem_addr(src)), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}
// Adds instead of overwriting, element by element in the map's type; no order among several adds.
DEV void tma_reduce_add_2d(const TensorMap* map, const void* src, i32 x, i32 y) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                   map),
               "r"(smem_addr(src)), "r"(x), "r"(y)
               : "memory");
}
DEV void tma_reduce_add_3d(const TensorMap* map, const void* src, i32 x, i32 y, i32 z) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(smem_addr(src)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
DEV void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most the last `N` groups of this thread are unfinished; `_read`: have shared memory unread.
template <int N>
DEV void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
template <int N>
DEV void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
// Makes this thread's plain writes of shared memory visible to bulk copies and wgmma. The writing thread calls it,
// before the barrier that lets another thread start the copy.
DEV void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Between plain writes of device memory and bulk copies of what was written: on the side of the writer, before it lets
// another thread know, or on that of the thread that starts the copy, after it was let know.
DEV void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

template <int N>
DEV void reg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
DEV void reg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
#endif

#if ARCH == 90
// ---- Tensor cores of sm_90a ----

DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most the last `N` groups are in flight.
template <int N>
DEV void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// What was computed before stays before, and no use of these moves ahead: after the wait for a product of its
// accumulators, and before one of what is to be computed while it runs.
template <int N>
DEV void settle(float (&d)[N]) {
  UNROLL for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// The accumulators' places in the instruction, ten at a time: %p0 to %p9.
#define P2_(p) "%" #p "0, %" #p "1"
#define P4_(p) P2_(p) ", %" #p "2, %" #p "3"
#define P6_(p) P4_(p) ", %" #p "4, %" #p "5"
#define P8_(p) P6_(p) ", %" #p "6, %" #p "7"
#define P10_(p) P8_(p) ", %" #p "8, %" #p "9"
#define P20_ P10_() ", " P10_(1)
#define P40_ P20_ ", " P10_(2) ", " P10_(3)
#define P80_ P40_ ", " P10_(4) ", " P10_(5) ", " P10_(6) ", " P10_(7)
#define D4_(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8_(i) D4_(i), D4_(i + 4)
#define D16_(i) D8_(i), D8_(i + 8)
#define D32_(i) D16_(i), D16_(i + 16)
#define D64_(i) D32_(i), D32_(i + 32)

template <int N, int TransA, int TransB>
struct WgmmaOp;

// `count` is N / 2; i0 to i7 number the operands behind the accumulators: count, count + 1, ... The asm
// clobbers no memory: it reads shared memory only, and the fences around it are barriers to the compiler.
#define WGMMA_(N, count, places, accumulators, i0, i1, i2, i3, i4, i5, i6, i7)                               \
  template <int TransA, int TransB>                                                                          \
  struct WgmmaOp<N, TransA, TransB> {                                                                        \
    static DEV void smem(float (&d)[count], u64 a, u64 b, u32 accumulate) {                                  \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2 ", 0;\n"                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" places "}, %" #i0 ", %" #i1  \
                   ", p, 1, 1, %" #i3 ", %" #i4 ";\n}"                                                       \
                   : accumulators                                                                            \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(TransA), "n"(TransB));                             \
    }                                                                                                        \
    static DEV void registers(float (&d)[count], const u32 (&a)[4], u64 b, u32 accumulate) {                 \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5 ", 0;\n"                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" places "}, {%" #i0 ", %" #i1 \
                   ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, %" #i6 ";\n}"                                  \
                   : accumulators                                                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TransB));      \
    }                                                                                                        \
  };
#define J_ ", "
#define C_ ,
WGMMA_(8, 4, P4_(), D4_(0), 4, 5, 6, 7, 8, 9, 10, 11)
WGMMA_(16, 8, P8_(), D8_(0), 8, 9, 10, 11, 12, 13, 14, 15)
WGMMA_(32, 16, P10_() J_ P6_(1), D16_(0), 16, 17, 18, 19, 20, 21, 22, 23)
WGMMA_(48, 24, P20_ J_ P4_(2), D16_(0) C_ D8_(16), 24, 25, 26, 27, 28, 29, 30, 31)
WGMMA_(64, 32, P20_ J_ P10_(2) J_ P2_(3), D32_(0), 32, 33, 34, 35, 36, 37, 38, 39)
WGMMA_(80, 40, P40_, D32_(0) C_ D8_(32), 40, 41, 42, 43, 44, 45, 46, 47)
WGMMA_(96, 48, P40_ J_ P8_(4), D32_(0) C_ D16_(32), 48, 49, 50, 51, 52, 53, 54, 55)
WGMMA_(112, 56, P40_ J_ P10_(4) J_ P6_(5), D32_(0) C_ D16_(32) C_ D8_(48), 56, 57, 58, 59, 60, 61, 62, 63)
WGMMA_(128, 64, P40_ J_ P10_(4) J_ P10_(5) J_ P4_(6), D64_(0), 64, 65, 66, 67, 68, 69, 70, 71)
WGMMA_(160, 80, P80_, D64_(0) C_ D16_(64), 80, 81, 82, 83, 84, 85, 86, 87)
WGMMA_(192, 96, P80_ J_ P10_(8) J_ P6_(9), D64_(0) C_ D32_(64), 96, 97, 98, 99, 100, 101, 102, 103)
WGMMA_(224, 112, P80_ J_ P10_(8) J_ P10_(9) J_ P10_(10) J_ P2_(11), D64_(0) C_ D32_(64) C_ D16_(96), 112, 113,
       114, 115, 116, 117, 118, 119)
WGMMA_(256, 128, P80_ J_ P10_(8) J_ P10_(9) J_ P10_(10) J_ P10_(11) J_ P8_(12), D64_(0) C_ D64_(64), 128, 129,
       130, 131, 132, 133, 134, 135)
#undef J_
#undef C_
#undef P2_
#undef P4_
#undef P6_
#undef P8_
#undef P10_
#undef P20_
#undef P40_
#undef P80_
#undef D4_
#undef D8_
#undef D16_
#undef D32_
#undef D64_
#undef WGMMA_

// d = a b, plus d where `accumulate`: a [64, 16] and b [16, N] in shared memory, d [64, N] spread over
// the warpgroup. An operand is K-major, or M- or N-major where its Trans is 1.
template <int N, int TransA, int TransB>
DEV void wgmma(float (&d)[N / 2], u64 a, u64 b, bool accumulate) {
  WgmmaOp<N, TransA, TransB>::smem(d, a, b, accumulate);
}
// The same with a in registers, laid out like the fragments of `mma_m16n8k16`, 16 rows a warp.
template <int N, int TransB>
DEV void wgmma_rs(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool accumulate) {
  WgmmaOp<N, 0, TransB>::registers(d, a, b, accumulate);
}
#endif
