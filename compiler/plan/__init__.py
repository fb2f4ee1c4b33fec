"""Spec → Plan: the mesh, the stages, and the table of the holders of each logical parameter."""
