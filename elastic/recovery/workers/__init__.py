"""The workers of this node: exits, announcements, standbys, leaving."""
