// A cuBLASLt without a GPU, for tests: it multiplies on the host, column-major as the real one, and
// says what it was asked.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 7, NOT_SUPPORTED = 15 };
enum { F32 = 0, BF16 = 14 };

static char said[1 << 20], wrong[1 << 16];
static size_t said_length;
static long alive, calls, fail_at;
static int fail_code, none, refuse;
static size_t version = 130400;
static char fail_only[64];

static void say(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  said_length += vsnprintf(said + said_length, sizeof said - said_length, format, arguments);
  va_end(arguments);
}
static int enter(const char *call) {
  say("%s\n", call);
  if (fail_only[0] && strcmp(fail_only, call)) return 0;
  return ++calls == fail_at ? fail_code : 0;
}
#define ENTER(name) do { int failed = enter(#name); if (failed) return failed; } while (0)

typedef struct { int transposed[2]; unsigned compute, scale, epilogue; const void *bias; } Description;
// Of groups where `arrays` are given: rows, columns and strides.
typedef struct { unsigned type; uint64_t rows, columns; int64_t stride; int groups, wide; const uint64_t *arrays[3]; } Layout;
typedef struct { uint64_t workspace; unsigned reduction, alignment[4]; int64_t average[3]; } Preference;
typedef struct { uint64_t data[8]; size_t workspace; unsigned status; float waves; int reserved[4]; } Heuristic;

size_t cublasLtGetVersion(void) { return version; }
int cublasLtCreate(void **handle) { ENTER(cublasLtCreate); alive++; *handle = malloc(1); return OK; }
static int destroy(const char *call, void *thing) { int failed = enter(call); alive--; free(thing); return failed; }
int cublasLtDestroy(void *handle) { return destroy("cublasLtDestroy", handle); }
int cublasLtMatmulDescCreate(Description **description, unsigned compute, unsigned scale) {
  ENTER(cublasLtMatmulDescCreate);
  alive++;
  *description = calloc(1, sizeof **description);
  (*description)->compute = compute, (*description)->scale = scale;
  return OK;
}
int cublasLtMatmulDescDestroy(Description *description) { return destroy("cublasLtMatmulDescDestroy", description); }
int cublasLtMatmulDescSetAttribute(Description *description, unsigned attribute, const void *value, size_t bytes) {
  ENTER(cublasLtMatmulDescSetAttribute);
  if ((attribute == 3 || attribute == 4) && bytes == 4) memcpy(&description->transposed[attribute - 3], value, 4);
  else if (attribute == 7 && bytes == 4) memcpy(&description->epilogue, value, 4);
  else if (attribute == 8 && bytes == 8) memcpy(&description->bias, value, 8);
  else return INVALID;
  return OK;
}
int cublasLtMatrixLayoutCreate(Layout **layout, unsigned type, uint64_t rows, uint64_t columns, int64_t stride) {
  ENTER(cublasLtMatrixLayoutCreate);
  if (stride < (int64_t)rows) return INVALID;
  alive++;
  *layout = calloc(1, sizeof **layout);
  **layout = (Layout){.type = type, .rows = rows, .columns = columns, .stride = stride};
  return OK;
}
int cublasLtGroupedMatrixLayoutCreate(Layout **layout, unsigned type, int groups, const void *rows, const void *columns,
                                      const void *stride) {
  ENTER(cublasLtGroupedMatrixLayoutCreate);
  if (groups < 1) return INVALID;
  alive++;
  *layout = calloc(1, sizeof **layout);
  **layout = (Layout){.type = type, .groups = groups, .arrays = {rows, columns, stride}};
  return OK;
}
int cublasLtMatrixLayoutSetAttribute(Layout *layout, unsigned attribute, const void *value, size_t bytes) {
  ENTER(cublasLtMatrixLayoutSetAttribute);
  int width;
  if ((attribute != 12 && attribute != 13) || bytes != 4 || !layout->groups) return INVALID;
  memcpy(&width, value, 4);
  if (width != 1) return INVALID;
  layout->wide |= 1 << (attribute - 12);
  return OK;
}
int cublasLtMatrixLayoutDestroy(Layout *layout) { return destroy("cublasLtMatrixLayoutDestroy", layout); }
int cublasLtMatmulPreferenceCreate(Preference **preference) {
  ENTER(cublasLtMatmulPreferenceCreate);
  alive++;
  *preference = calloc(1, sizeof **preference);
  return OK;
}
int cublasLtMatmulPreferenceDestroy(Preference *preference) { return destroy("cublasLtMatmulPreferenceDestroy", preference); }
int cublasLtMatmulPreferenceSetAttribute(Preference *preference, unsigned attribute, const void *value, size_t bytes) {
  ENTER(cublasLtMatmulPreferenceSetAttribute);
  if (attribute == 1 && bytes == 8) memcpy(&preference->workspace, value, 8);
  else if (attribute == 3 && bytes == 4) memcpy(&preference->reduction, value, 4);
  else if (attribute >= 13 && attribute <= 15 && bytes == 8) memcpy(&preference->average[attribute - 13], value, 8);
  else if (attribute >= 5 && attribute <= 8 && bytes == 4) memcpy(&preference->alignment[attribute - 5], value, 4);
  else return INVALID;
  return OK;
}
int cublasLtMatmulAlgoGetHeuristic(void *handle, Description *description, Layout *a, Layout *b, Layout *c, Layout *d,
                                   Preference *preference, int wanted, Heuristic *results, int *found) {
  ENTER(cublasLtMatmulAlgoGetHeuristic);
  say("  compute %u scale %u workspace %lu reduction %u alignment %u %u %u %u\n", description->compute,
      description->scale, (unsigned long)preference->workspace, preference->reduction, preference->alignment[0],
      preference->alignment[1], preference->alignment[2], preference->alignment[3]);
  if (d->groups)
    say("  groups %d on average %ld of %ld x %ld\n", d->groups, (long)preference->average[0], (long)preference->average[1],
        (long)preference->average[2]);
  if (description->epilogue) say("  epilogue %u\n", description->epilogue);
  *found = 0;
  if (none) return NOT_SUPPORTED;
  if (refuse || wanted < 1) return OK;
  *found = 1;
  results[0] = (Heuristic){.data = {0xA160}, .workspace = 4096};
  return OK;
}
static float load(const void *base, unsigned type, int64_t at) {
  if (type == F32) return ((const float *)base)[at];
  uint32_t bits = (uint32_t)((const uint16_t *)base)[at] << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static void store(void *base, unsigned type, int64_t at, float value) {
  if (type == F32) { ((float *)base)[at] = value; return; }
  uint32_t bits;
  memcpy(&bits, &value, 4);
  ((uint16_t *)base)[at] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static int multiply(const Description *description, float alpha, const void *a, const Layout *la, const void *b,
                    const Layout *lb, float beta, void *d, const Layout *ld) {
  uint64_t m = ld->rows, n = ld->columns, k = description->transposed[0] ? la->rows : la->columns;
  if ((description->transposed[0] ? la->columns : la->rows) != m || (description->transposed[1] ? lb->rows : lb->columns) != n ||
      (description->transposed[1] ? lb->columns : lb->rows) != k)
    return INVALID;
  for (uint64_t j = 0; j < n; j++)
    for (uint64_t i = 0; i < m; i++) {
      float sum = 0;
      for (uint64_t p = 0; p < k; p++)
        sum += load(a, la->type, description->transposed[0] ? p + i * la->stride : i + p * la->stride) *
               load(b, lb->type, description->transposed[1] ? j + p * lb->stride : p + j * lb->stride);
      int64_t at = i + j * ld->stride;
      if (description->epilogue == 4) sum += load(description->bias, ld->type, i);
      store(d, ld->type, at, alpha * sum + (beta ? beta * load(d, ld->type, at) : 0));
    }
  return OK;
}
// The layout of one group's matrix.
static Layout of_group(const Layout *layout, int group) {
  return (Layout){.type = layout->type, .rows = layout->arrays[0][group], .columns = layout->arrays[1][group],
                  .stride = layout->arrays[2][group]};
}
int cublasLtMatmul(void *handle, Description *description, const float *alpha, const void *a, Layout *la, const void *b,
                   Layout *lb, const float *beta, const void *c, Layout *lc, void *d, Layout *ld, const uint64_t *algorithm,
                   void *workspace, size_t workspace_bytes, void *stream) {
  ENTER(cublasLtMatmul);
  say("  stream %p workspace %p %zu\n", stream, workspace, workspace_bytes);
  if (algorithm[0] != 0xA160 || c != d || lc != ld || la->groups != ld->groups || lb->groups != ld->groups) return INVALID;
  if (!ld->groups) return multiply(description, *alpha, a, la, b, lb, *beta, d, ld);
  if ((la->wide & lb->wide & ld->wide) != 3 || description->epilogue) return INVALID;
  for (int group = 0; group < ld->groups; group++) {
    const void *ga = ((const void **)a)[group], *gb = ((const void **)b)[group];
    void *gd = ((void **)d)[group];
    if (((uintptr_t)ga | (uintptr_t)gb | (uintptr_t)gd) % 16) return INVALID;
    Layout l[3] = {of_group(la, group), of_group(lb, group), of_group(ld, group)};
    int failed = multiply(description, *alpha, ga, &l[0], gb, &l[1], *beta, gd, &l[2]);
    if (failed) return failed;
  }
  return OK;
}

const char *mock_said(void) { return said; }
const char *mock_wrong(void) { return wrong; }
void mock_fail(long n, int code, const char *only) {
  calls = 0, fail_at = n, fail_code = code;
  snprintf(fail_only, sizeof fail_only, "%s", only ? only : "");
}
long mock_calls(void) { return calls; }
long mock_alive(void) { return alive; }
// No algorithm from now on: by an error (1), or by an empty list (2).
void mock_capability(int how) { none = how == 1, refuse = how == 2; }
void mock_version(long number) { version = number; }
