"""A fleet over days or months, in stretches of constant load instead of single kernels."""
