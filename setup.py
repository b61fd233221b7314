"""Build nearkv's one native module. Without a C compiler everything installs but this."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "nearkv.transfer._copy",
            ["src/nearkv/transfer/_copy.c"],
            extra_compile_args=["-O3", "-std=c11"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
