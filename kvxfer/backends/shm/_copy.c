/* Copying a batch of pieces in one C loop, without the GIL. copying.py has the same in Python.
 *
 * Limited API of CPython 3.10: one file serves 3.10 and every later version. Buffers joined that
 * API in 3.11, so vectors come as the addresses of their first elements.
 */
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* A batch of at least so many bytes hardly stays in the cache: write past it. Then no line of the
 * target is fetched only to be overwritten, which takes a third of the traffic. */
#define STREAM_FROM (1 << 18)
/* Shorter pieces do not pay for their unaligned ends. */
#define STREAM_PIECE 1024
#define LINE 64

#if defined(__SSE2__)

/* As memcpy, for n >= LINE. The two do not overlap. */
static void
stream(char *to, const char *from, size_t n)
{
    size_t head = (size_t)(-(uintptr_t)to & (LINE - 1));
    memcpy(to, from, head);
    to += head, from += head, n -= head;
    for (; n >= LINE; to += LINE, from += LINE, n -= LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)from);
        __m128i b = _mm_loadu_si128((const __m128i *)from + 1);
        __m128i c = _mm_loadu_si128((const __m128i *)from + 2);
        __m128i d = _mm_loadu_si128((const __m128i *)from + 3);
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)to + 1, b);
        _mm_stream_si128((__m128i *)to + 2, c);
        _mm_stream_si128((__m128i *)to + 3, d);
    }
    memcpy(to, from, n);
}

/* Before anybody is told that the bytes are there. */
static void
settle(void)
{
    _mm_sfence();
}

#else

static void
stream(char *to, const char *from, size_t n)
{
    memcpy(to, from, n);
}

static void
settle(void)
{
}

#endif

static int
overlap(const char *to, const char *from, size_t n)
{
    return (uintptr_t)to - (uintptr_t)from < n || (uintptr_t)from - (uintptr_t)to < n;
}

static void
copy_all(const int64_t *target, const int64_t *source, const int64_t *size, Py_ssize_t count)
{
    uint64_t total = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        total += (uint64_t)size[i];
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        char *to = (char *)(intptr_t)target[i];
        const char *from = (const char *)(intptr_t)source[i];
        size_t n = (size_t)size[i];
#if defined(__GNUC__)
        if (i + 1 < count) {  /* blocks lie anywhere: have the next one's page looked up by then */
            for (int64_t line = 0; line < 4 * LINE; line += LINE) {
                __builtin_prefetch((const char *)(intptr_t)(source[i + 1] + line));
            }
        }
#endif
        if (total >= STREAM_FROM && n >= STREAM_PIECE && !overlap(to, from, n)) {
            stream(to, from, n);
        } else {
            /* Not memcpy: where a process moves bytes within one region, they may overlap. */
            memmove(to, from, n);
        }
    }
    settle();
}

/* copy(target, source, size, count): each of the first three is the address of `count` int64.
 *
 * The caller holds those vectors, has checked every piece against its region, and keeps the regions
 * mapped until the call returns; this is where it trusts copiers.py.
 */
static PyObject *
copy(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_ssize_t target, source, size, count;
    if (!PyArg_ParseTuple(arguments, "nnnn:copy", &target, &source, &size, &count)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    copy_all((const int64_t *)target, (const int64_t *)source, (const int64_t *)size, count);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, "copy(target, source, size, count), see copiers.py"},
    {NULL, NULL, 0, NULL},
};

/* What copiers.py expects of this file; another number means a build of other sources. */
static int
add_revision(PyObject *module)
{
    return PyModule_AddIntConstant(module, "REVISION", 1);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, add_revision},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_copy",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__copy(void)
{
    return PyModuleDef_Init(&definition);
}
