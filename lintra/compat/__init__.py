"""Interfaces of other libraries on top of this one."""
