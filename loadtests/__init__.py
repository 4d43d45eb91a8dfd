"""Mock engines, workloads and demonstrations."""
