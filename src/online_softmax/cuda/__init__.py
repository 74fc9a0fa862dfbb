"""CUDA C++ kernels: headers, ladder, and launch.py, which says how each is launched."""
