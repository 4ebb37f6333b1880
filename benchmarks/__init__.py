"""Measurements that only documents quote, no part of the wheel; `lintra bench` has what users need."""
