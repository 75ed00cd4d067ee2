"""Small real models and batches that many tests share."""
