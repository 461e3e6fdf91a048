"""`nemo-patches demo --hang NAME`: hangs that people have reported, each as a small job on two CPU ranks."""
