"""What SGLang 0.5.23 lacks to serve on a machine without a GPU.

``platform`` switches CPU mode on before SGLang decides what machine it is on, ``sgl_kernel``
stands in for the CUDA-only wheel of that name, and ``hooks`` lists the functions that close the
remaining gaps. Import of this package stays free of torch and sglang.
"""
