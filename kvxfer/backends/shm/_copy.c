/* Copying a batch of pieces in one C loop, without the GIL. copying.py has the same in Python.
 *
 * Limited API of CPython 3.10: one file serves 3.10 and every later version.
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

/* A vector of int64 as numpy has it, `step` bytes from one element to the next. */
typedef struct {
    const char *data;
    Py_ssize_t step;
} Vector;

static inline int64_t
at(Vector vector, Py_ssize_t i)
{
    int64_t value;
    memcpy(&value, vector.data + i * vector.step, sizeof value);
    return value;
}

static void
copy_all(Vector target, Vector source, Vector size, Py_ssize_t count)
{
    uint64_t total = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        total += (uint64_t)at(size, i);
    }
    for (Py_ssize_t i = 0, next; i < count; i = next) {
        int64_t first = at(target, i), of = at(source, i), sum = at(size, i);
        /* What follows on both sides is the same piece. */
        for (next = i + 1; next < count && at(target, next) == first + sum
                           && at(source, next) == of + sum; next++) {
            sum += at(size, next);
        }
        char *to = (char *)(intptr_t)first;
        const char *from = (const char *)(intptr_t)of;
        size_t n = (size_t)sum;
#if defined(__GNUC__)
        if (next < count) {  /* blocks lie anywhere: have the next one's page looked up by then */
            for (int64_t line = 0; line < 4 * LINE; line += LINE) {
                __builtin_prefetch((const char *)(intptr_t)(at(source, next) + line));
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

/* What `array.__array_struct__` points to: numpy's array interface, version 3 of its protocol. */
typedef struct {
    int two;
    int nd;
    char typekind;
    int itemsize;
    int flags;
    Py_ssize_t *shape;
    Py_ssize_t *strides;
    void *data;
    PyObject *descr;
} ArrayInterface;

#define NOT_SWAPPED 0x200

/* The vector in `array`, and its length; *held keeps it alive. -1 with an exception if it is none.
 * Through that protocol because buffers joined the limited API in 3.11 only. */
static int
vector_of(PyObject *array, PyObject **held, Vector *vector, Py_ssize_t *length)
{
    *held = PyObject_GetAttrString(array, "__array_struct__");
    if (*held == NULL) {
        return -1;
    }
    const ArrayInterface *found = PyCapsule_GetPointer(*held, NULL);
    if (found == NULL) {
        return -1;
    }
    if (found->two != 2 || found->nd != 1 || found->typekind != 'i' || found->itemsize != 8
        || !(found->flags & NOT_SWAPPED)) {
        PyErr_SetString(PyExc_TypeError, "not a vector of int64");
        return -1;
    }
    vector->data = found->data;
    vector->step = found->strides[0];
    *length = found->shape[0];
    return 0;
}

/* copy(target, source, size): vectors of int64, addresses the first two.
 *
 * The caller has checked every piece against its region, and keeps the regions mapped until the
 * call returns; this is where it trusts copiers.py.
 */
static PyObject *
copy(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *arrays[3], *held[3] = {NULL, NULL, NULL}, *result = NULL;
    Vector vectors[3];
    Py_ssize_t count[3];
    if (!PyArg_ParseTuple(arguments, "OOO:copy", &arrays[0], &arrays[1], &arrays[2])) {
        return NULL;
    }
    for (int i = 0; i < 3; i++) {
        if (vector_of(arrays[i], &held[i], &vectors[i], &count[i]) < 0) {
            goto done;
        }
    }
    if (count[0] != count[1] || count[0] != count[2]) {
        PyErr_Format(PyExc_ValueError, "vectors of lengths %zd, %zd and %zd", count[0], count[1],
                     count[2]);
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    copy_all(vectors[0], vectors[1], vectors[2], count[0]);
    Py_END_ALLOW_THREADS
    Py_INCREF(Py_None);
    result = Py_None;
done:
    for (int i = 0; i < 3; i++) {
        Py_XDECREF(held[i]);
    }
    return result;
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, "copy(target, source, size), see copiers.py"},
    {NULL, NULL, 0, NULL},
};

/* What copiers.py expects of this file; another number means a build of other sources. */
static int
add_revision(PyObject *module)
{
    return PyModule_AddIntConstant(module, "REVISION", 2);
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
