//! Least squares of low rank from sums over samples.
//!
//! What a layer's routers say of a text is never kept: of each token, `[x | r]` times `x` is added to one matrix, and
//! that is all that a linear fit needs, however long the text is. `x` is what the tap saw, `r` what its logits missed.
//!
//! Source: reduced-rank regression, Izenman 1975; with a ridge, Mukherjee and Zhu 2011.

use nalgebra::{Cholesky, DMatrix, DVector, SymmetricEigen};

/// Columns that are updated at once: only what lies on or below the diagonal is.
const UPDATED: usize = 256;
/// Columns that are eliminated at once.
const ELIMINATED: usize = 64;

/// Sums over the tokens of one layer.
pub(super) struct Normal {
    /// Values of `x` and of `r`.
    shape: [usize; 2],
    /// `Σ [x | r] xᵀ`, `[n_x + n_r, n_x]`; of the first part only what is on or below the diagonal.
    products: DMatrix<f64>,
    /// `Σ [x | r]`.
    sums: DVector<f64>,
    tokens: usize,
}

/// A linear map of low rank: `up · (downᵀ · x) + bias`.
pub(super) struct Map {
    /// `[n_x, rank]`, the direction that matters most first.
    pub(super) down: DMatrix<f64>,
    /// `[n_r, rank]`.
    pub(super) up: DMatrix<f64>,
    mean_x: DVector<f64>,
    mean_r: DVector<f64>,
}

/// Memory of the sums of one layer.
pub(super) const fn bytes([n_x, n_r]: [usize; 2]) -> u64 {
    8 * ((n_x + n_r) * n_x + n_x + n_r) as u64
}

/// Memory that adding tokens (`at_once` of them) and solving take besides.
pub(super) const fn work_bytes([n_x, n_r]: [usize; 2], at_once: usize, rank: usize) -> u64 {
    let added = 2 * at_once * (n_x + n_r);
    let solved = (n_x + n_r) * (n_x + 2 * ELIMINATED) + 4 * n_r * n_r + 4 * rank * (n_x + n_r);
    8 * (added + solved) as u64
}

impl Normal {
    pub(super) fn new(shape: [usize; 2]) -> Self {
        let [n_x, n_r] = shape;
        let (products, sums) = (DMatrix::zeros(n_x + n_r, n_x), DVector::zeros(n_x + n_r));
        Self { shape, products, sums, tokens: 0 }
    }

    /// Adds tokens, one column `[x | r]` each.
    pub(super) fn add(&mut self, samples: &DMatrix<f64>) {
        let [n_x, n_r] = self.shape;
        let transposed = samples.rows(0, n_x).transpose();
        for first in (0..n_x).step_by(UPDATED) {
            let (rows, columns) = (n_x + n_r - first, UPDATED.min(n_x - first));
            let mut part = self.products.view_mut((first, first), (rows, columns));
            let (left, right) = (samples.rows(first, rows), transposed.columns(first, columns));
            part.gemm(1.0, &left, &right, 1.0);
        }
        self.sums += samples.column_sum();
        self.tokens += samples.ncols();
    }

    /// The map of at most this rank that misses least, with a penalty of `ridge` times the mean square of `x` on its
    /// size; none if the sums do not allow one.
    pub(super) fn solve(&self, ridge: f64, rank: usize) -> Option<Map> {
        let [n_x, n_r] = self.shape;
        let n = self.tokens as f64;
        let means = &self.sums / n.max(1.0);
        let (mean_x, mean_r) = (means.rows(0, n_x).into_owned(), means.rows(n_x, n_r).into_owned());
        let mut work = self.products.clone();
        for (mut column, mean) in work.column_iter_mut().zip(mean_x.iter()) {
            column.axpy(-n * mean, &means, 1.0);
        }
        let trace: f64 = (0..n_x).map(|i| work[(i, i)]).sum();
        let penalty = ridge * trace / n_x as f64;
        if !penalty.is_finite() || penalty <= 0.0 {
            return None;
        }
        for i in 0..n_x {
            work[(i, i)] += penalty;
        }
        eliminate(&mut work, n_x)?;
        // Now `L` above, and below it `(L⁻¹ Xᵀ R)ᵀ`, whose Gram matrix is that of the fitted values.
        let (factor, fitted) = (work.view((0, 0), (n_x, n_x)), work.view((n_x, 0), (n_r, n_x)));
        let eigen = SymmetricEigen::try_new(fitted * fitted.transpose(), f64::EPSILON, 10_000)?;
        let mut order: Vec<usize> = (0..n_r).collect();
        order.sort_by(|a, b| eigen.eigenvalues[*b].total_cmp(&eigen.eigenvalues[*a]));
        order.truncate(rank);
        let up = eigen.eigenvectors.select_columns(&order);
        let mut down = (up.transpose() * fitted).transpose();
        let solved = factor.tr_solve_lower_triangular_mut(&mut down);
        solved.then_some(Map { down, up, mean_x, mean_r })
    }
}

impl Map {
    pub(super) fn rank(&self) -> usize {
        self.up.ncols()
    }

    /// What is added besides, for the first `rank` directions.
    pub(super) fn bias(&self, rank: usize) -> DVector<f64> {
        let (down, up) = (self.down.columns(0, rank), self.up.columns(0, rank));
        &self.mean_r - up * (down.transpose() * &self.mean_x)
    }
}

/// Cholesky's factorisation of the square part on top, in place; what is below it is multiplied by the inverse of the
/// transposed factor. None if the matrix is not positive.
fn eliminate(matrix: &mut DMatrix<f64>, n: usize) -> Option<()> {
    let rows = matrix.nrows();
    for first in (0..n).step_by(ELIMINATED) {
        let width = ELIMINATED.min(n - first);
        let corner = matrix.view((first, first), (width, width)).into_owned();
        let corner = Cholesky::new(corner)?.unpack();
        matrix.view_mut((first, first), (width, width)).copy_from(&corner);
        let (below, height) = (first + width, rows - first - width);
        let mut transposed = matrix.view((below, first), (height, width)).transpose();
        if !corner.solve_lower_triangular_mut(&mut transposed) {
            return None;
        }
        let panel = transposed.transpose();
        matrix.view_mut((below, first), (height, width)).copy_from(&panel);
        for left in (below..n).step_by(UPDATED) {
            let (height, columns) = (rows - left, UPDATED.min(n - left));
            let mut rest = matrix.view_mut((left, left), (height, columns));
            let (a, b) =
                (panel.rows(left - below, height), transposed.columns(left - below, columns));
            rest.gemm(-1.0, &a, &b, 1.0);
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of mean 0 from a generator with a fixed start.
    struct Noise(u64);

    impl Noise {
        fn next(&mut self) -> f64 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 11) as f64 / (1_u64 << 53) as f64 - 0.5
        }

        fn matrix(&mut self, rows: usize, columns: usize) -> DMatrix<f64> {
            DMatrix::from_fn(rows, columns, |_, _| self.next())
        }
    }

    #[test]
    fn elimination_gives_the_factor_and_what_it_leaves_below() {
        let mut noise = Noise(7);
        // More than one block, and not a multiple of one.
        let (n, extra) = (2 * ELIMINATED + 5, 3);
        let half = noise.matrix(n, n);
        let square = &half * half.transpose() + DMatrix::identity(n, n);
        let below = noise.matrix(extra, n);
        let mut work = DMatrix::zeros(n + extra, n);
        work.view_mut((0, 0), (n, n)).copy_from(&square.lower_triangle());
        work.view_mut((n, 0), (extra, n)).copy_from(&below);
        eliminate(&mut work, n).unwrap();
        let factor = work.view((0, 0), (n, n)).into_owned().lower_triangle();
        assert!((&factor * factor.transpose() - square).amax() < 1e-9);
        let left = work.view((n, 0), (extra, n)).into_owned();
        assert!((left * factor.transpose() - below).amax() < 1e-9);
        assert!(eliminate(&mut DMatrix::from_element(3, 3, -1.0), 3).is_none());
    }

    #[test]
    fn a_map_of_low_rank_is_found_again_from_sums_in_pieces() {
        let mut noise = Noise(11);
        let (n_x, n_r, rank) = (UPDATED + 9, 12, 3);
        let truth = noise.matrix(n_r, rank) * noise.matrix(rank, n_x);
        let shift = noise.matrix(n_r, 1);
        let mut normal = Normal::new([n_x, n_r]);
        for _ in 0..40 {
            let x = noise.matrix(n_x, 25).add_scalar(0.3);
            let mut r = &truth * &x + 0.001 * noise.matrix(n_r, 25);
            r.column_iter_mut().for_each(|mut column| column += &shift);
            let mut samples = DMatrix::zeros(n_x + n_r, 25);
            samples.rows_mut(0, n_x).copy_from(&x);
            samples.rows_mut(n_x, n_r).copy_from(&r);
            normal.add(&samples);
        }
        let x = noise.matrix(n_x, 10);
        let error = |map: &Map, rank: usize| {
            let fitted = map.up.columns(0, rank) * (map.down.columns(0, rank).transpose() * &x);
            let mut missed = &truth * &x - fitted;
            let bias = map.bias(rank) - shift.column(0);
            missed.column_iter_mut().for_each(|mut column| column -= &bias);
            missed.norm() / (&truth * &x).norm()
        };
        let map = normal.solve(1e-6, 8).unwrap();
        assert_eq!(map.rank(), 8);
        let errors = [1, 2, 3, 8].map(|rank| error(&map, rank));
        assert!(errors[0] > 0.2 && errors[1] > 0.05, "{errors:?}");
        assert!(errors[2] < 0.01 && errors[3] < 0.01, "{errors:?}");
        let timid = normal.solve(100.0, 3).unwrap();
        assert!(error(&timid, 3) > 0.3, "a penalty keeps it small");
    }

    #[test]
    fn nothing_seen_gives_no_map() {
        assert!(Normal::new([4, 2]).solve(0.1, 2).is_none());
    }
}
