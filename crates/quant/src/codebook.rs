//! The grids of the IQ formats: every code names a short vector of small integers.
//!
//! `codebooks/codebooks.bin` was made by `codebooks/generate.py`; its licence lies beside it.

const DATA: &[u8; 33_792] = include_bytes!("../codebooks/codebooks.bin");

const fn grid<const WIDTH: usize, const ENTRIES: usize>(start: usize) -> [[i8; WIDTH]; ENTRIES] {
    let mut grid = [[0; WIDTH]; ENTRIES];
    let mut entry = 0;
    while entry < ENTRIES {
        let mut j = 0;
        while j < WIDTH {
            grid[entry][j] = DATA[start + entry * WIDTH + j].cast_signed();
            j += 1;
        }
        entry += 1;
    }
    grid
}

/// Grid of `IQ2_XXS`: values 8, 25, 43.
pub static IQ2_XXS: [[i8; 8]; 256] = grid(0);
/// Grid of `IQ2_XS`: values 8, 25, 43.
pub static IQ2_XS: [[i8; 8]; 512] = grid(2048);
/// Grid of `IQ2_S`: values 8, 25, 43.
pub static IQ2_S: [[i8; 8]; 1024] = grid(6144);
/// Grid of `IQ3_XXS`: values 4, 12, … 62.
pub static IQ3_XXS: [[i8; 4]; 256] = grid(14_336);
/// Grid of `IQ3_S`: odd values 1 to 15.
pub static IQ3_S: [[i8; 4]; 512] = grid(15_360);
/// Grid of `IQ1_S` and `IQ1_M`: values -1, 0, 1.
pub static IQ1: [[i8; 8]; 2048] = grid(17_408);

/// Levels of `IQ4_NL` and `IQ4_XS`.
pub static IQ4: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Doubled E2M1 values of `MXFP4`.
pub static FP4: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Signs of a group of 8 from 7 bits: the eighth makes the number of set bits even.
#[inline(always)]
pub const fn even_signs(index: u8) -> u8 {
    index | ((index.count_ones() as u8 & 1) << 7)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values<const W: usize>(grid: &[[i8; W]]) -> Vec<i8> {
        let mut values: Vec<i8> = grid.iter().flatten().copied().collect();
        values.sort_unstable();
        values.dedup();
        values
    }

    #[test]
    fn grids_hold_the_values_of_their_format_and_no_entry_twice() {
        assert_eq!(values(&IQ2_XXS), [8, 25, 43]);
        assert_eq!(values(&IQ2_XS), [8, 25, 43]);
        assert_eq!(values(&IQ2_S), [8, 25, 43]);
        assert_eq!(values(&IQ3_XXS), [4, 12, 20, 28, 36, 44, 52, 62]);
        assert_eq!(values(&IQ3_S), [1, 3, 5, 7, 9, 11, 13, 15]);
        assert_eq!(values(&IQ1), [-1, 0, 1]);
        let mut entries = IQ1.to_vec();
        entries.sort_unstable();
        entries.dedup();
        assert_eq!(entries.len(), 2048);
    }

    #[test]
    fn seven_bit_signs_have_even_parity() {
        for index in 0..128 {
            let signs = even_signs(index);
            assert_eq!((signs.count_ones() % 2, signs & 127), (0, index));
        }
    }
}
