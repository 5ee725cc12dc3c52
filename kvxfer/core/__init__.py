"""Values and decisions. Nothing here imports a backend or a policy; ``control`` alone does I/O."""
