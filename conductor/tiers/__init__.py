"""Where blocks are kept below the GPU: what is written, what makes room for it, when it comes back."""
