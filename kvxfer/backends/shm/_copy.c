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

/* copy(target, source, size, count): each of the first three is the address of `count` int64.
 *
 * The caller holds those vectors, has checked every piece against its region, and keeps the regions
 * mapped until the call returns; this is where it trusts copiers.py. memmove, not memcpy: a piece
 * may overlap its own source, where a process moves bytes within one region.
 */
static PyObject *
copy(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_ssize_t targets, sources, sizes, count;
    if (!PyArg_ParseTuple(arguments, "nnnn:copy", &targets, &sources, &sizes, &count)) {
        return NULL;
    }
    const int64_t *target = (const int64_t *)targets;
    const int64_t *source = (const int64_t *)sources;
    const int64_t *size = (const int64_t *)sizes;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++) {
        memmove((void *)(intptr_t)target[i], (const void *)(intptr_t)source[i], (size_t)size[i]);
    }
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
