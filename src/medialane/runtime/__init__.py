"""Processes and tasks on Linux: private and locked files, parent death, forks, phases, signs of life, watched tasks.

Each file is a door of its own: what starts fast, as `medialane --help` does, imports only the one that it needs.
"""
