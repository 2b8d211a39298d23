"""kc.export_c: a network as one C99 file that needs no library, for processors of any size."""
