"""Machines and their slots: who may run where."""
