"""What lecture.ipynb needs: its pictures, and the checks of its exercises."""
