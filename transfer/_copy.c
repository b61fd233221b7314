/*
 * Copying many runs between two buffers without the GIL.
 *
 * Long runs are written with non-temporal stores on x86: an ordinary store first reads the line
 * that it overwrites, a third of the memory traffic of a copy. What was written is not in the
 * cache afterwards, which suits memory that another process reads later. Loads ask for the
 * next run's beginning ahead of time, as the processor's own prefetching ends at each page.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAVE_NON_TEMPORAL 1
#include <immintrin.h>
#else
#define HAVE_NON_TEMPORAL 0
#endif

/* Below this, what a run costs is the call, not the stores. */
#define SHORTEST_NON_TEMPORAL 8192
#define LINE 64

typedef void (*copy_one)(char *target, const char *source, size_t size, const char *next);

static void copy_plain(char *target, const char *source, size_t size, const char *next) {
    (void)next;
    memcpy(target, source, size);
}

static void copy_careful(char *target, const char *source, size_t size, const char *next) {
    (void)next;
    memmove(target, source, size);
}

#if HAVE_NON_TEMPORAL
/* Bring the target to a line's beginning; returns how many bytes that took. */
static inline size_t align_target(char *target, const char *source) {
    size_t head = (size_t)(-(uintptr_t)target & (LINE - 1));
    if (head)
        memcpy(target, source, head);
    return head;
}

#define PREFETCH_AHEAD 512

static inline void ask_for(const char *next) {
    for (size_t at = 0; at < PREFETCH_AHEAD; at += LINE)
        _mm_prefetch(next + at, _MM_HINT_T0);
}

__attribute__((target("avx512f"))) static void
copy_avx512(char *target, const char *source, size_t size, const char *next) {
    if (size < SHORTEST_NON_TEMPORAL) {
        memcpy(target, source, size);
        return;
    }
    size_t at = align_target(target, source);
    for (; at + 4 * LINE <= size; at += 4 * LINE) {
        const char *from = source + at;
        char *to = target + at;
        _mm_prefetch(from + 2 * PREFETCH_AHEAD, _MM_HINT_T0);
        _mm_prefetch(from + 2 * PREFETCH_AHEAD + LINE, _MM_HINT_T0);
        _mm_prefetch(from + 2 * PREFETCH_AHEAD + 2 * LINE, _MM_HINT_T0);
        _mm_prefetch(from + 2 * PREFETCH_AHEAD + 3 * LINE, _MM_HINT_T0);
        __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + LINE);
        __m512i c = _mm512_loadu_si512(from + 2 * LINE), d = _mm512_loadu_si512(from + 3 * LINE);
        _mm512_stream_si512((void *)to, a);
        _mm512_stream_si512((void *)(to + LINE), b);
        _mm512_stream_si512((void *)(to + 2 * LINE), c);
        _mm512_stream_si512((void *)(to + 3 * LINE), d);
    }
    ask_for(next);
    memcpy(target + at, source + at, size - at);
}

__attribute__((target("avx2"))) static void
copy_avx2(char *target, const char *source, size_t size, const char *next) {
    if (size < SHORTEST_NON_TEMPORAL) {
        memcpy(target, source, size);
        return;
    }
    size_t at = align_target(target, source);
    for (; at + 2 * LINE <= size; at += 2 * LINE) {
        const __m256i *from = (const __m256i *)(source + at);
        __m256i *to = (__m256i *)(target + at);
        _mm_prefetch((const char *)from + 2 * PREFETCH_AHEAD, _MM_HINT_T0);
        _mm_prefetch((const char *)from + 2 * PREFETCH_AHEAD + LINE, _MM_HINT_T0);
        __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
        __m256i c = _mm256_loadu_si256(from + 2), d = _mm256_loadu_si256(from + 3);
        _mm256_stream_si256(to, a);
        _mm256_stream_si256(to + 1, b);
        _mm256_stream_si256(to + 2, c);
        _mm256_stream_si256(to + 3, d);
    }
    ask_for(next);
    memcpy(target + at, source + at, size - at);
}
#endif

static copy_one fastest(const char **name) {
#if HAVE_NON_TEMPORAL
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) {
        *name = "avx512";
        return copy_avx512;
    }
    if (__builtin_cpu_supports("avx2")) {
        *name = "avx2";
        return copy_avx2;
    }
#endif
    *name = "memcpy";
    return copy_plain;
}

static copy_one named(const char *name) {
    if (strcmp(name, "memcpy") == 0)
        return copy_plain;
#if HAVE_NON_TEMPORAL
    __builtin_cpu_init();
    if (strcmp(name, "avx2") == 0 && __builtin_cpu_supports("avx2"))
        return copy_avx2;
    if (strcmp(name, "avx512") == 0 && __builtin_cpu_supports("avx512f"))
        return copy_avx512;
#endif
    return NULL;
}

static void copy_all(char *target, const char *source, const int64_t *to, const int64_t *from,
                     const int64_t *length, Py_ssize_t count, copy_one copy) {
    for (Py_ssize_t i = 0; i < count; i++) {
        /* Past the last one, something that exists is asked for. */
        const char *next = source + from[i + 1 < count ? i + 1 : i];
        copy(target + to[i], source + from[i], (size_t)length[i], next);
    }
#if HAVE_NON_TEMPORAL
    /* Non-temporal stores are not ordered with those that say "done". */
    _mm_sfence();
#endif
    /* The fence of a lease is read after this, also by processors that would rather not. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

/* Whether all runs lie within a buffer; written so that no sum can overflow. */
static int all_within(const int64_t *offset, const int64_t *length, Py_ssize_t count, Py_ssize_t size) {
    for (Py_ssize_t i = 0; i < count; i++)
        if (offset[i] < 0 || length[i] < 0 || length[i] > size || offset[i] > size - length[i])
            return 0;
    return 1;
}

static int overlap(const Py_buffer *a, const Py_buffer *b) {
    uintptr_t x = (uintptr_t)a->buf, y = (uintptr_t)b->buf;
    return x < y + (uintptr_t)b->len && y < x + (uintptr_t)a->len;
}

/* Get a list of 64-bit numbers; returns their count, or -1 with an exception. */
static Py_ssize_t get_numbers(PyObject *object, Py_buffer *numbers) {
    if (PyObject_GetBuffer(object, numbers, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0)
        return -1;
    const char *format = numbers->format ? numbers->format : "B";
    if (numbers->itemsize != 8 || (strcmp(format, "l") && strcmp(format, "q"))) {
        PyErr_SetString(PyExc_TypeError, "offsets and lengths must be arrays of int64");
        PyBuffer_Release(numbers);
        return -1;
    }
    return numbers->len / 8;
}

static PyObject *run_copies(Py_buffer *target, Py_buffer *source, Py_buffer lists[3],
                            Py_ssize_t count, copy_one copy) {
    const int64_t *to = lists[0].buf, *from = lists[1].buf, *length = lists[2].buf;
    if (!all_within(to, length, count, target->len)) {
        PyErr_SetString(PyExc_ValueError, "a run lies outside the target");
        return NULL;
    }
    if (!all_within(from, length, count, source->len)) {
        PyErr_SetString(PyExc_ValueError, "a run lies outside the source");
        return NULL;
    }
    if (overlap(target, source))
        copy = copy_careful;
    Py_BEGIN_ALLOW_THREADS
    copy_all(target->buf, source->buf, to, from, length, count, copy);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *copy_runs(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer target, source, lists[3];
    PyObject *arrays[3], *result = NULL;
    const char *how = NULL, *ignored;
    if (!PyArg_ParseTuple(args, "w*y*OOO|z", &target, &source, &arrays[0], &arrays[1], &arrays[2], &how))
        return NULL;
    copy_one copy = how ? named(how) : fastest(&ignored);
    if (copy == NULL)
        PyErr_Format(PyExc_ValueError, "this processor has no way of copying named %s", how);
    Py_ssize_t counts[3];
    int held = 0;
    for (; copy && held < 3; held++)
        if ((counts[held] = get_numbers(arrays[held], &lists[held])) < 0)
            break;
    if (held == 3) {
        if (counts[0] != counts[2] || counts[1] != counts[2])
            PyErr_SetString(PyExc_ValueError, "offsets and lengths differ in number");
        else
            result = run_copies(&target, &source, lists, counts[2], copy);
    }
    while (held)
        PyBuffer_Release(&lists[--held]);
    PyBuffer_Release(&target);
    PyBuffer_Release(&source);
    return result;
}

static PyObject *best(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    const char *name;
    fastest(&name);
    return PyUnicode_FromString(name);
}

static PyMethodDef methods[] = {
    {"copy_runs", copy_runs, METH_VARARGS,
     "copy_runs(target, source, target_offsets, source_offsets, lengths, how=None)\n\n"
     "Copy runs without the GIL. Raises ValueError when one lies outside; nothing is written then."},
    {"best", best, METH_NOARGS, "Return how this processor copies best: avx512, avx2 or memcpy."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_copy", "Copying runs between buffers.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__copy(void) { return PyModuleDef_Init(&definition); }
