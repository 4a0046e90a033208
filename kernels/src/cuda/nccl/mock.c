// An NCCL without GPUs, for tests: it writes down what it is asked, goes through the motions of a
// library that works in the background, and between ranks that are threads of one process it moves
// the data, device memory being host memory.
//
// The interface of the tests is at the end. Calls go to one process-wide state, so a test that wants
// its own loads its own copy of the library.
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INTERNAL = 3, INVALID = 4, USAGE = 5, REMOTE = 6, BUSY = 7 };
enum { RANKS = 16, PARTS = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static char said[1 << 23], wrong[1 << 16];
static size_t said_length;
static long calls, fail_at, alive;
static int fail_code, ids, polls, moves, broken, broken_rank, last_failed;
static char fail_only[64];
// Lets what is queued on a stream happen, where a driver queues it.
static __thread int (*drain)(void *stream);

static void say(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  pthread_mutex_lock(&lock);
  // Who asks a communicator for seconds on end says more than fits.
  if (said_length < sizeof said - 1024)
    said_length += vsnprintf(said + said_length, sizeof said - said_length, format, arguments);
  pthread_mutex_unlock(&lock);
  va_end(arguments);
}
static void violation(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  pthread_mutex_lock(&lock);
  size_t used = strlen(wrong);
  vsnprintf(wrong + used, sizeof wrong - used, format, arguments);
  pthread_mutex_unlock(&lock);
  va_end(arguments);
}
// Counts the call; not zero where it was told to fail.
static int enter(const char *call) {
  say("%s\n", call);
  if (fail_only[0] && strcmp(fail_only, call)) return 0;
  pthread_mutex_lock(&lock);
  int failed = ++calls == fail_at ? fail_code : 0;
  pthread_mutex_unlock(&lock);
  last_failed = failed ? failed : last_failed;
  return failed;
}
#define ENTER(name) do { int failed = enter(#name); if (failed) return failed; } while (0)

// ---- Communicators ----

typedef struct { const char *src; char *dst; size_t count; int type, op, root; } Op;
typedef struct { int send, peer, type; char *base; size_t count; } Part;
typedef struct Clique {  // the ranks of one communicator
  struct Clique *next;
  char name[128];
  int size, arrived, joined, aborted;
  long generation;
  Op ops[RANKS];
  Part parts[RANKS][PARTS];
  int num_parts[RANKS], colours[RANKS], keys[RANKS];
  struct Message *messages;  // sent and not received, the oldest first
} Clique;
typedef struct Message { struct Message *next; int from, to, type; size_t count; char *data; } Message;
static Clique *cliques;
typedef struct { Clique *clique; int rank, busy, finalized, gone, number; } Comm;
static int numbers;
typedef struct { char bytes[128]; } Id;
typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, cga, min, max;
  const char *net;
  int share;
} Config;

static Clique *clique_of(const char *name, int size) {
  pthread_mutex_lock(&lock);
  Clique *clique = cliques;
  while (clique && strcmp(clique->name, name)) clique = clique->next;
  if (!clique) {
    clique = calloc(1, sizeof *clique);
    snprintf(clique->name, sizeof clique->name, "%s", name);
    clique->size = size;
    clique->next = cliques;
    cliques = clique;
  }
  pthread_mutex_unlock(&lock);
  return clique;
}
static Comm *made(Clique *clique, int rank) {
  Comm *comm = calloc(1, sizeof *comm);
  comm->clique = clique;
  comm->rank = rank;
  comm->busy = polls;
  pthread_mutex_lock(&lock);
  comm->number = numbers++;
  alive++;
  pthread_mutex_unlock(&lock);
  return comm;
}
// All ranks of a clique; not zero where one of them aborted.
static int meet(Clique *clique) {
  pthread_mutex_lock(&lock);
  long generation = clique->generation;
  if (++clique->arrived == clique->size) {
    clique->arrived = 0;
    clique->generation++;
    pthread_cond_broadcast(&changed);
  }
  while (generation == clique->generation && !clique->aborted) pthread_cond_wait(&changed, &lock);
  // Who aborts after all were there takes nothing from those who are only waking up.
  int failed = generation == clique->generation ? REMOTE : OK;
  pthread_mutex_unlock(&lock);
  return failed;
}
static int usable(const char *call, Comm *comm) {
  if (!comm || comm->gone) { violation("%s on a communicator that is gone\n", call); return 0; }
  if (comm->finalized) { violation("%s after the end was begun\n", call); return 0; }
  if (comm->busy) { violation("%s on a communicator that is busy\n", call); return 0; }
  return 1;
}

const char *ncclGetErrorString(int code) {
  switch (code) {
    case INTERNAL: return "internal error";
    case INVALID: return "invalid argument";
    case USAGE: return "invalid usage";
    case REMOTE: return "remote process exited or there was a network error";
    default: return "unknown result code";
  }
}
const char *ncclGetLastError(void *comm) {
  if (comm) violation("the last error of a communicator\n");
  return last_failed ? "socket 7 of peer 3 was closed\n" : "";
}
int ncclGetVersion(int *version) { *version = 22809; return OK; }
int ncclGetUniqueId(Id *id) {
  ENTER(ncclGetUniqueId);
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof id->bytes, "id %d", ids++);
  return OK;
}
int ncclCommInitRankConfig(Comm **comm, int ranks, Id id, int rank, Config *config) {
  ENTER(ncclCommInitRankConfig);
  if (config->magic != 0xcafebeef || config->size < sizeof *config - 4 || config->version < 21800) return INVALID;
  int *tail = (int *)((char *)config + 44);
  if (config->size > 44 && *tail != INT32_MIN) violation("a traffic class\n");
  if (config->blocking != 0) violation("a blocking communicator\n");
  if (config->cga != INT32_MIN || config->min != INT32_MIN || config->max != INT32_MIN || config->net) violation("tuned by accident\n");
  *comm = made(clique_of(id.bytes, ranks), rank);
  say("  %s, rank %d of %d, version %u, share %d\n", id.bytes, rank, ranks, config->version, config->share);
  return polls ? BUSY : OK;
}
int ncclCommSplit(Comm *comm, int colour, int key, Comm **group, Config *config) {
  ENTER(ncclCommSplit);
  if (!usable("ncclCommSplit", comm)) return USAGE;
  say("  rank %d: colour %d key %d\n", comm->rank, colour, key);
  if (config && (config->magic != 0xcafebeef || config->blocking != 0 || config->share != 0))
    violation("a group with another configuration than one that shares nothing\n");
  Clique *parent = comm->clique;
  *group = 0;
  int size = 1, rank = key;
  if (moves) {
    parent->colours[comm->rank] = colour;
    parent->keys[comm->rank] = key;
    if (meet(parent)) return REMOTE;
    size = rank = 0;
    for (int other = 0; other < parent->size; other++) {
      size += parent->colours[other] == colour;
      rank += parent->colours[other] == colour && parent->keys[other] < key;
    }
    if (meet(parent)) return REMOTE;
  }
  if (colour >= 0) {
    char name[128];
    // The generation tells one split of the parent from the next.
    snprintf(name, sizeof name, "%.60s/%ld/%d", parent->name, parent->generation, colour);
    *group = made(clique_of(name, size), rank);
  }
  comm->busy = polls;
  return polls ? BUSY : OK;
}
int ncclCommGetAsyncError(Comm *comm, int *state) {
  ENTER(ncclCommGetAsyncError);
  if (comm->gone) violation("asking a communicator that is gone\n");
  int failed = comm->rank == broken_rank ? broken : OK;
  *state = failed ? failed : comm->busy ? BUSY : OK;
  if (failed) last_failed = failed;
  if (comm->busy > 0) comm->busy--;
  return OK;
}
int ncclCommFinalize(Comm *comm) {
  ENTER(ncclCommFinalize);
  if (!usable("ncclCommFinalize", comm)) return USAGE;
  say("  %d\n", comm->number);
  comm->finalized = 1;
  comm->busy = polls;
  return polls ? BUSY : OK;
}
static void end(const char *call, Comm *comm) {
  if (comm->gone) violation("%s of what is gone\n", call);
  comm->gone = 1;
  pthread_mutex_lock(&lock);
  alive--;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}
int ncclCommDestroy(Comm *comm) {
  int failed = enter("ncclCommDestroy");
  say("  %d\n", comm->number);
  if (!comm->finalized || comm->busy) violation("destroyed before its end was there\n");
  end("ncclCommDestroy", comm);
  return failed;
}
int ncclCommAbort(Comm *comm) {
  int failed = enter("ncclCommAbort");
  say("  %d\n", comm->number);
  comm->clique->aborted = 1;
  end("ncclCommAbort", comm);
  return failed;
}

// ---- Collectives ----

static size_t width(int type) { return type == 9 ? 2 : 4; }
static float load(const char *base, size_t at, int type) {
  if (type == 9) {
    uint32_t bits = (uint32_t)((const uint16_t *)base)[at] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
  }
  return ((const float *)base)[at];
}
static void store(char *base, size_t at, int type, float value) {
  if (type != 9) { ((float *)base)[at] = value; return; }
  uint32_t bits;
  memcpy(&bits, &value, 4);
  ((uint16_t *)base)[at] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
// As the dtype stores it.
static float rounded(float value, int type) {
  char stored[4];
  store(stored, 0, type, value);
  return load(stored, 0, type);
}
// The reduction of elements `from ..` of all ranks, in rank order. Every partial sum is rounded to the
// dtype, as in NCCL's ring, where it goes on to the next rank in that dtype.
static void combine(Clique *clique, char *into, size_t from, size_t count, int type, int op) {
  for (size_t i = 0; i < count; i++) {
    if (type == 2) {
      int32_t sum = ((const int32_t *)clique->ops[0].src)[from + i];
      for (int rank = 1; rank < clique->size; rank++) {
        int32_t term = ((const int32_t *)clique->ops[rank].src)[from + i];
        sum = op == 2 ? (term > sum ? term : sum) : sum + term;
      }
      ((int32_t *)into)[i] = sum;
      continue;
    }
    float sum = load(clique->ops[0].src, from + i, type);
    for (int rank = 1; rank < clique->size; rank++) {
      float term = load(clique->ops[rank].src, from + i, type);
      sum = op == 2 ? (term > sum ? term : sum) : rounded(sum + term, type);
    }
    store(into, i, type, sum);
  }
}
enum { REDUCE, SCATTER, GATHER, BROADCAST, ALL_TO_ALL };
static int collective(const char *call, int kind, const void *src, void *dst, size_t count, int type, int op, int root,
                      Comm *comm, void *stream) {
  int failed = enter(call);
  if (failed) return failed;
  if (!usable(call, comm)) return USAGE;
  if (type != 2 && type != 7 && type != 9) return INVALID;
  say("  comm %d: %zu of type %d, op %d, root %d%s\n", comm->number, count, type, op, root, src == dst ? ", in place" : "");
  Clique *clique = comm->clique;
  if (!moves) return OK;
  if (drain) drain(stream);
  clique->ops[comm->rank] = (Op){src, dst, count, type, op, root};
  if (meet(clique)) return REMOTE;
  size_t unit = width(type), bytes = count * unit, whole = bytes * (kind == GATHER || kind == ALL_TO_ALL ? clique->size : 1);
  char *result = malloc(whole + 1);
  if (kind == REDUCE) combine(clique, result, 0, count, type, op);
  if (kind == SCATTER) combine(clique, result, comm->rank * count, count, type, op);
  if (kind == GATHER)
    for (int rank = 0; rank < clique->size; rank++) memcpy(result + rank * bytes, clique->ops[rank].src, bytes);
  if (kind == BROADCAST) memcpy(result, clique->ops[root].src, bytes);
  if (kind == ALL_TO_ALL)
    for (int rank = 0; rank < clique->size; rank++) memcpy(result + rank * bytes, clique->ops[rank].src + comm->rank * bytes, bytes);
  for (int rank = 0; rank < clique->size; rank++)
    if (clique->ops[rank].count != count || clique->ops[rank].type != type) violation("%s of different sizes\n", call);
  if (meet(clique)) { free(result); return REMOTE; }
  memcpy(dst, result, whole);
  free(result);
  return OK;
}
int ncclAllReduce(const void *src, void *dst, size_t count, int type, int op, Comm *comm, void *stream) {
  return collective("ncclAllReduce", REDUCE, src, dst, count, type, op, 0, comm, stream);
}
int ncclReduceScatter(const void *src, void *dst, size_t count, int type, int op, Comm *comm, void *stream) {
  return collective("ncclReduceScatter", SCATTER, src, dst, count, type, op, 0, comm, stream);
}
int ncclAllGather(const void *src, void *dst, size_t count, int type, Comm *comm, void *stream) {
  return collective("ncclAllGather", GATHER, src, dst, count, type, 0, 0, comm, stream);
}
int ncclBroadcast(const void *src, void *dst, size_t count, int type, int root, Comm *comm, void *stream) {
  return collective("ncclBroadcast", BROADCAST, src, dst, count, type, 0, root, comm, stream);
}
int ncclAlltoAll(const void *src, void *dst, size_t count, int type, Comm *comm, void *stream) {
  return collective("ncclAlltoAll", ALL_TO_ALL, src, dst, count, type, 0, 0, comm, stream);
}

// ---- Sends and receives: in groups, all ranks of a communicator at once, or one message alone ----

// A lone send is taken along and its sender goes on; a lone receive waits for it.
static void post(Clique *clique, int from, const Part *sent) {
  Message *message = calloc(1, sizeof *message);
  size_t bytes = sent->count * width(sent->type);
  *message = (Message){0, from, sent->peer, sent->type, sent->count, malloc(bytes + 1)};
  memcpy(message->data, sent->base, bytes);
  pthread_mutex_lock(&lock);
  Message **last = &clique->messages;
  while (*last) last = &(*last)->next;
  *last = message;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}
static int take(Clique *clique, int to, const Part *wanted) {
  pthread_mutex_lock(&lock);
  Message **at;
  for (;;) {
    for (at = &clique->messages; *at && ((*at)->from != wanted->peer || (*at)->to != to);) at = &(*at)->next;
    if (*at || clique->aborted) break;
    pthread_cond_wait(&changed, &lock);
  }
  Message *message = *at;
  if (message) *at = message->next;
  pthread_mutex_unlock(&lock);
  if (!message) return REMOTE;
  if (message->count != wanted->count || message->type != wanted->type) violation("a message of another size\n");
  else memcpy(wanted->base, message->data, wanted->count * width(wanted->type));
  free(message->data);
  free(message);
  return OK;
}

static __thread int depth, num_parts;
static __thread Part parts[PARTS];
static __thread Comm *grouped;
static __thread void *grouped_on;

int ncclGroupStart(void) {
  ENTER(ncclGroupStart);
  if (depth++) violation("a group within a group\n");
  num_parts = 0;
  grouped = 0;
  return OK;
}
static int part(const char *call, int send, void *base, size_t count, int type, int peer, Comm *comm, void *stream) {
  int failed = enter(call);
  if (failed) return failed;
  if (!usable(call, comm)) return USAGE;
  if (!depth) violation("%s outside of a group\n", call);
  say("  comm %d: %zu of type %d, peer %d\n", comm->number, count, type, peer);
  parts[num_parts++] = (Part){send, peer, type, base, count};
  grouped = comm;
  grouped_on = stream;
  return OK;
}
int ncclSend(const void *src, size_t count, int type, int peer, Comm *comm, void *stream) {
  return part("ncclSend", 1, (void *)src, count, type, peer, comm, stream);
}
int ncclRecv(void *dst, size_t count, int type, int peer, Comm *comm, void *stream) {
  return part("ncclRecv", 0, dst, count, type, peer, comm, stream);
}
int ncclGroupEnd(void) {
  int failed = enter("ncclGroupEnd");
  if (--depth) violation("a group ends that did not start\n");
  if (failed) return failed;
  // A rank without anything to say is in no clique, so tests that move data say something to all.
  if (!grouped) return OK;
  Comm *comm = grouped;
  if (moves) {
    Clique *clique = comm->clique;
    if (drain) drain(grouped_on);
    if (num_parts == 1 && parts[0].peer != comm->rank) {
      if (parts[0].send) post(clique, comm->rank, &parts[0]);
      else if (take(clique, comm->rank, &parts[0])) return REMOTE;
      comm->busy = polls;
      return polls ? BUSY : OK;
    }
    memcpy(clique->parts[comm->rank], parts, sizeof parts);
    clique->num_parts[comm->rank] = num_parts;
    if (meet(clique)) return REMOTE;
    char *results[PARTS] = {0};
    for (int i = 0; i < num_parts; i++) {
      Part *mine = &parts[i];
      if (mine->send) continue;
      Part *theirs = 0;
      for (int j = 0; j < clique->num_parts[mine->peer] && !theirs; j++) {
        Part *candidate = &clique->parts[mine->peer][j];
        if (candidate->send && candidate->peer == comm->rank) theirs = candidate;
      }
      size_t bytes = mine->count * width(mine->type);
      results[i] = malloc(bytes + 1);
      if (!theirs || theirs->count != mine->count || theirs->type != mine->type) violation("a receive without its send\n");
      else memcpy(results[i], theirs->base, bytes);
    }
    if (meet(clique)) return REMOTE;
    for (int i = 0; i < num_parts; i++) {
      if (!results[i]) continue;
      memcpy(parts[i].base, results[i], parts[i].count * width(parts[i].type));
      free(results[i]);
    }
  }
  comm->busy = polls;
  return polls ? BUSY : OK;
}

// ---- The interface of the tests ----

const char *mock_said(void) { return said; }
const char *mock_wrong(void) { return wrong; }
long mock_alive(void) { return alive; }
long mock_calls(void) { return calls; }
void mock_fail(long n, int code, const char *only) {
  calls = 0;
  fail_at = n;
  fail_code = code;
  snprintf(fail_only, sizeof fail_only, "%s", only);
}
// How often a busy communicator says so; -1 without end.
void mock_busy(int times) { polls = times; }
// From now on communicators of the rank say that this went wrong in the background.
void mock_break(int rank, int code) { broken_rank = rank; broken = code; }
// Data is moved between ranks, which are threads; `with` lets a stream of this thread catch up.
void mock_move(int (*with)(void *)) { moves = 1; drain = with; }
