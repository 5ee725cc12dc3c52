"""Public reports and behaviours of engines, each as a test with its numbers."""
