"""Processes and tasks on Linux: lock files, parent death, forks ahead, watched tasks, systemd."""
